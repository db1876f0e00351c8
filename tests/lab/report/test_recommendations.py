"""What the page says to take: the fastest and the leanest choice, and their ties, with commands for a fresh clone."""

from pathlib import Path

from lab.report.recommendations import loses_precision, recommendations
from lab.report.source import read_source
from lab.sweep import compare
from tests.lab.report.sample_rows import make_row, write_generations, write_row, write_sweep

ROOT = Path(__file__).resolve().parents[3]


def test_a_sweep_opens_with_its_fastest_and_its_leanest_choice(tmp_path):
    """The sample has amp and bf16 of GPT-2 124M, and two choices of 350M."""
    found = recommendations(read_source(write_sweep(tmp_path / "mine")).measured)
    assert [take.title for take in found] == [
        "Training gpt2_124m in bf16, sequences of 1,024 tokens",
        "Training gpt2_350m in bf16, sequences of 1,024 tokens",
        "Training gpt2_124m in amp, sequences of 1,024 tokens",
    ]
    for take in found:
        speeds = [choice.comparable_speed for choice in take.ladder]
        assert speeds == sorted(speeds)
        assert len(take.lines) == len(speeds)
        peaks = [choice.memory for choice in take.ladder]
        assert take.picks[0].choice.comparable_speed == max(speeds)
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


def test_the_ladder_follows_the_ratios(tmp_path):
    """The median tokens/s of the leanest is higher, but its ratio to the baseline is lower."""
    for number, (kernels, attn) in enumerate((("compile", "sdpa"), ("triton", "sdpa"), ("triton", "flash"))):
        row = make_row(kernels, attn)
        if attn == "sdpa" and kernels == "triton":
            row["perf/tokens_per_sec"] *= 1.2
        write_row(tmp_path / str(number), row | {"mem/peak_allocated_gib": 20 + number})
    [take] = recommendations(read_source(tmp_path).measured)
    names = [choice.name for choice in take.ladder]
    assert max(take.ladder, key=lambda choice: choice.speed).name == "triton · sdpa"
    assert names[-1] == take.picks[0].choice.name == "triton · flash"
    ratios = [choice.ratio.value for choice in take.ladder]
    assert ratios == sorted(ratios)


def test_a_work_without_a_choice_is_left_out(tmp_path):
    """Its row stays in the tables. Two commits or two ways to use GPUs are no choice of kernels either."""
    write_row(tmp_path / "1", make_row())
    write_row(tmp_path / "2", make_row("triton", "flash", "bf16"))
    write_row(tmp_path / "3", make_row("triton", "sdpa", "bf16") | {"world_size": 2})
    source = read_source(tmp_path)
    assert len(source.measured) == 3
    assert recommendations(source.measured) == []
    assert recommendations(read_source(ROOT / "results/h200x4").measured) == []
    for take in recommendations(read_source(ROOT / "results/h200").measured):
        assert len(take.ladder) > 1


def test_the_newest_of_the_fastest_sessions_counts(tmp_path):
    """Two machines of one kind differ by 6%, so a lead of 3% says nothing. A single choice is no session to take."""
    days, number = {1: 1.03, 2: 1.0, 3: 0.8, 4: 1.0}, 0  # day -> its speed
    for day, speed in days.items():
        for kernels, attn in (("triton", "flash"), ("eager", "sdpa"))[: 1 if day == 4 else 2]:
            row = make_row(kernels, attn, scale=1 / speed)
            env = row["env"] | {"git_commit": str(day)}
            write_row(tmp_path / str(number), row | {"started": f"2026-11-2{day}T08:00:00+0000", "env": env})
            number += 1
    [take] = recommendations(read_source(tmp_path).measured)
    assert {choice.row["started"][:10] for choice in take.ladder} == {"2026-11-22"}
    assert len(take.ladder) == 2


def test_the_page_of_a_device_has_fp8_beside_bf16():
    """results/h200-fp8 has the only training of gpt2_1558m. It does not replace the ladder of gpt2_124m."""
    source = read_source(ROOT / "results/h200")
    assert "gpt2_1558m" in {choice.preset for choice in source.measured_choices}
    titles = {take.title: take for take in recommendations(source.measured)}
    large = titles["Training gpt2_1558m in bf16, sequences of 1,024 tokens"]
    assert [pick.label for pick in large.picks] == ["Fastest", "Faster, but it rounds more"]


def test_the_report_of_a_device_has_its_ladder():
    """results/h200-rungs is one sitting of eager PyTorch to fp8; its choices are in the page of results/h200."""
    ladder = recommendations(read_source(ROOT / "results/h200-rungs").measured)[0]
    device = next(
        take for take in recommendations(read_source(ROOT / "results/h200").measured) if take.title == ladder.title
    )
    assert [choice.row["started"] for choice in device.ladder] == [choice.row["started"] for choice in ladder.ladder]
    ratios = [compare.ratio(b.rows, a.rows) for a, b in zip(ladder.ladder, ladder.ladder[1:], strict=False)]
    assert [cells[2] for _, cells in ladder.lines[1:]] == list(map(str, ratios))
