"""What the page says to take: the fastest and the leanest choice, and their ties, with commands for a fresh clone."""

import shlex
from pathlib import Path

import pytest

from kernels.names import OPS
from lab.report.recommendations import loses_precision, recommendations
from lab.report.source import read_source
from lab.report.user_command import user_command
from lab.sweep import compare
from tests.lab.report.sample_rows import make_row, write_generations, write_row, write_sweep
from tests.test_readmes import check
from tests.test_train import config

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = "h200", "h200-rungs", "h200-fp8", "h200x2", "h200x4", "h100", "h100x2"


def test_a_sweep_opens_with_its_fastest_and_its_leanest_choice(tmp_path):
    """The sample has amp and bf16 of GPT-2 124M, and two choices of 350M."""
    found = recommendations(read_source(write_sweep(tmp_path / "mine")).measured)
    assert [take.title for take in found] == [
        "Training gpt2_124m in bf16, sequences of 1,024 tokens",
        "Training gpt2_350m in bf16, sequences of 1,024 tokens",
        "Training gpt2_124m in amp, sequences of 1,024 tokens",
    ]
    for take in found:
        speeds = [choice.speed for choice in take.ladder]
        assert speeds == sorted(speeds)
        assert len(take.lines) == len(speeds)
        peaks = [choice.memory for choice in take.ladder]
        assert take.picks[0].choice.speed == max(speeds)
        assert take.picks[-1].choice.memory == min(peaks)
    assert [pick.label for pick in found[0].picks] == ["Fastest", "Leanest"]
    assert [pick.label for pick in found[1].picks] == ["Fastest and leanest"]
    assert found[0].picks[0].command == (
        "python train.py model=gpt2_124m kernels=triton kernels.compile=true attn=flash precision=bf16"
    )


def test_ties_are_named(tmp_path):
    """Two choices whose intervals contain 1, and two without intervals whose spreads overlap."""
    for laps in (True, False):
        folder = tmp_path / str(laps)
        for number, scale in enumerate((1.0, 1.001, 1.2)):
            row = make_row("triton", "flash", scale=scale)
            row["config"]["kernels"]["norm"] = ("triton", "eager", "liger")[number]
            write_row(folder / str(number), row if laps else {k: v for k, v in row.items() if k != "perf/laps_s"})
        [take] = recommendations(read_source(folder).measured)
        assert len(take.picks[0].ties) == 1
        assert {take.picks[0].choice.row["config"]["kernels"]["norm"]} | {
            tie.row["config"]["kernels"]["norm"] for tie in take.picks[0].ties
        } == {"triton", "eager"}


def test_a_choice_that_rounds_more_is_named_apart(tmp_path):
    """int8 is the fastest decoder of the sample, and it rounds the weights."""
    found = recommendations(read_source(write_generations(tmp_path / "mine")).measured)
    assert len(found) == 4  # two batches and two prompts
    for take in found:
        fastest, *_, rounded = take.picks
        assert fastest.choice.name == "decode triton"
        assert (rounded.label, rounded.choice.name) == ("Faster, but it rounds more", "decode int8")
        assert loses_precision(rounded.choice)
        assert "kernels.decode=triton" in fastest.command


@pytest.mark.parametrize("name", FOLDERS)
def test_every_command_runs_in_a_fresh_clone_and_chooses_what_the_row_ran(name):
    """It names no data, no checkpoint and no folder, and train.py reads the kernels and the model of the row in it."""
    found = recommendations(read_source(ROOT / "results" / name).measured)
    assert found
    for pick in [pick for take in found for pick in take.picks]:
        words = shlex.split(pick.command)
        check(words[1:])
        assert not any(word.startswith(("data", "init_from", "out_dir", "prompts")) for word in words)
        assert not any("checkpoint=" in word and word != "checkpoint=random" for word in words)
        row = pick.choice.row["config"]
        if not pick.choice.generates:
            words = words[words.index("train.py") + 1 :]
            cfg = config(*(word.replace("attn=", "attn.impl=") if word[:5] == "attn=" else word for word in words))
            assert (cfg.precision, cfg.attn.impl) == (row["precision"], row["attn"]["impl"])
            chosen = {op: name for op, name in row["kernels"].items() if op in OPS}
            assert {op: getattr(cfg.kernels, op) for op in chosen} == chosen
            shape = {key: value for key, value in row["model"].items() if key != "vocab_size"}
            assert {key: getattr(cfg.model, key) for key in shape} == shape
            assert cfg.train.block_size == row["train"]["block_size"]
            assert cfg.train.tokens_per_step == row["train"]["tokens_per_step"]


def test_a_backend_that_is_gone_has_no_command():
    row = make_row()
    assert user_command(row).startswith("python train.py model=gpt2_124m kernels=eager")
    row["config"]["kernels"]["norm"] = "gone"
    assert user_command(row) == ""
    row["config"]["kernels"]["norm"] = "~/evil.py"
    assert user_command(row) == ""


def test_the_report_of_a_device_has_its_ladder():
    """results/h200-rungs is one sitting of eager PyTorch to fp8; its choices are in the page of results/h200."""
    ladder = recommendations(read_source(ROOT / "results/h200-rungs").measured)[0]
    device = next(
        take for take in recommendations(read_source(ROOT / "results/h200").measured) if take.title == ladder.title
    )
    assert [choice.row["started"] for choice in device.ladder] == [choice.row["started"] for choice in ladder.ladder]
    ratios = [compare.ratio(b.rows, a.rows) for a, b in zip(ladder.ladder, ladder.ladder[1:], strict=False)]
    assert [cells[2] for _, cells in ladder.lines[1:]] == list(map(str, ratios))
