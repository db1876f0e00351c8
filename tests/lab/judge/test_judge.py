"""The verdict from rows, and the training that the rows come from."""

import re

import pytest
import torch

from kernels.registry import AttnConfig, KernelError, KernelsConfig, contract
from lab.judge import claim as claims
from lab.judge.claim import (
    Claim,
    benchmark_op,
    check_claim,
    choose_backends,
    ignored_settings,
    probe_cases,
    training_words,
    wrong_answers,
)
from lab.judge.verdict import judge_claim, page, speed_figure, verdict_table
from lab.recipe import Recipe
from lab.report.page import write_report
from lab.rows import append_rows
from model.config import GPTConfig
from runtime.config import UserError

CPU = torch.device("cpu")
CLAIM = Claim("norm", "triton", "eager")
ENV = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "git_commit": "5918f41a4eb37d063a8"}
CASES = {"fp32 768": "ok: torch", "bf16 768": "unavailable: it needs a GPU", "fp32 training": "ok: torch"}


def run(impl, ms, status="ok"):
    """A row of train.py whose five intervals take `ms` milliseconds a step, give or take 0.1%."""
    row = {
        "status": status,
        "parameters": 124_475_904,
        "config": {
            "precision": "bf16",
            "kernels": {"norm": impl, "mlp": "triton", "loss": "triton", "compile": False},
            "attn": {"impl": "flash", "version": None},
            "train": {"batch_size": 64, "block_size": 1024},
        },
        "env": ENV | {"gpu": "0"},
        "steps": 60,
    }
    if status == "ok":
        row |= {"perf/laps_s": [ms / 1e3 * (1 + 0.0005 * i) for i in range(-2, 3)], "train/loss": 7.6}
        row |= {"perf/tokens_per_sec": 65_536e3 / ms, "mem/peak_allocated_gib": 16.3}
        row |= {"parity": {"ok": True, "loss_error": 1e-3, "loss_bound": 2e-3}}
    return row


def bench(impl, ms):
    figures = {"both/ms": ms, "both/ms/p20": 0.99 * ms, "both/ms/p80": 1.01 * ms, "both/of_floor": 0.9}
    return {"impl": impl, **figures, "extra_gib": None, "error/out": 1e-7, "error/gradients": 1e-7}


def verdict_of(ms, alone_ms=1.0, base_ms=100.0):
    """The verdict on a norm whose step takes `ms`, against one whose step takes `base_ms`. Three runs of each."""
    runs = {"eager": [run("eager", base_ms)] * 3, "triton": [run("triton", ms)] * 3}
    row = judge_claim(CLAIM, CASES, runs, [bench("triton", alone_ms), bench("eager", 1.0)])
    return row | {"command": "python -m scripts.judge op=norm impl=triton", "env": ENV}


@pytest.mark.parametrize(("ms", "verdict"), [(90, "faster"), (99.9, "tie"), (100.1, "tie"), (110, "slower")])
def test_the_verdict_is_that_of_the_training(ms, verdict, tmp_path):
    """Alone the op is twice as slow, which does not count. A difference of 0.1% is below what a comparison resolves."""
    row = verdict_of(ms, alone_ms=2.0)
    assert row["verdict"] == verdict
    assert row["ratio"]["value"] == pytest.approx(100 / ms)
    text = page(row)
    assert (
        f"**norm=triton is right. Training with it runs at {100 / ms:.3f}x the speed of training with eager (" in text
    )
    assert f"), which is {verdict.replace('tie', 'a tie')}. Alone, the op runs at 0.500x the speed of eager.**" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["tokens/s in training", f"{65_536e3 / ms:,.0f}", "655,360"] in cells
    assert ["error of the losses", "1.0e-03", "1.0e-03"] in cells
    assert (
        "The baseline is 124M, bf16, 64 x 1024 tokens, triton, norm eager, attention flash. Each side has 3 runs"
        in text
    )
    assert "Of 3 cases, 2 are ok, 1 is unavailable." in text
    assert "- unavailable: it needs a GPU\n" in text
    assert speed_figure(row, tmp_path / "card.png").read_bytes().startswith(b"\x89PNG")


def test_times_alone_that_overlap_are_a_tie():
    assert "Alone, the op runs as fast as eager.**" in page(verdict_of(90, alone_ms=1.015))


def test_a_wrong_case_is_the_verdict_and_no_speed_is_shown():
    statuses = CASES | {"fp32 769": "wrong: out0: error 1", "fp32 narrow": "failed: exit code 1"}
    row = judge_claim(CLAIM, statuses, {}, []) | {"command": "judge", "env": ENV}
    assert (row["verdict"], wrong_answers(statuses)) == (
        "wrong",
        ["fp32 769: wrong: out0: error 1", "fp32 narrow: failed: exit code 1"],
    )
    text = page(row)
    assert "**norm=triton is wrong: fp32 769: wrong: out0: error 1 (and 1 more)**" in text
    assert "- fp32 narrow: failed: exit code 1\n" in text
    assert "tokens/s" not in text


def test_cases_with_the_same_error_share_a_line():
    statuses = dict.fromkeys(("fp32 769", "bf16 769"), "failed: exit code 1") | {"fp32 narrow": "wrong: out0: error 1"}
    row = judge_claim(CLAIM, statuses, {}, []) | {"command": "judge", "env": ENV}
    assert [line for line in page(row).splitlines() if line.startswith("- ")] == [
        "- fp32 769, bf16 769: failed: exit code 1",
        "- fp32 narrow: wrong: out0: error 1",
    ]


def test_a_case_without_an_answer_is_neither_right_nor_wrong():
    statuses = CASES | {"fp32 769": "undecided: no answer within 120 s", "fp32 8192": "undecided: out of memory"}
    row = judge_claim(CLAIM, statuses, {}, []) | {"command": "judge", "env": ENV}
    reason = "fp32 769: undecided: no answer within 120 s (and 1 more); raise limit=SECONDS, or free memory"
    assert (row["verdict"], row["reason"], wrong_answers(statuses)) == ("none", reason, [])
    text = page(row)
    assert f"**norm=triton could not be judged: {reason}**" in text
    assert "- fp32 8192: undecided: out of memory\n" in text


def test_wrong_losses_in_training_are_the_verdict_too():
    runs = {"eager": [run("eager", 100)], "triton": [run("triton", 90, "wrong: the losses are off")]}
    row = judge_claim(CLAIM, CASES, runs, [bench("triton", 1), bench("eager", 1)])
    assert (row["verdict"], row["reason"]) == ("wrong", "wrong: the losses are off")


def test_a_run_without_a_speed_gives_no_verdict():
    runs = {"eager": [run("eager", 100)], "triton": [run("triton", 90, "oom")]}
    row = judge_claim(CLAIM, CASES, runs, [bench("triton", 1), bench("eager", 1)])
    assert (row["verdict"], row["reason"]) == ("none", "oom")


def test_verdicts_become_a_table(results):
    append_rows(results / "h200" / "judge.jsonl", [verdict_of(90), verdict_of(110)])
    *_, newest, oldest = verdict_table("h200").splitlines()
    assert [cell.strip() for cell in newest.split("|")[1:5]] == ["norm", "triton", "eager", "slower"]
    assert [cell.strip() for cell in oldest.split("|")[4:8]] == [
        "faster",
        f"{10 / 9:.3f}x ({row_interval(90)})",
        "tie",
        "5918f41",
    ]


def test_the_report_of_the_folder_shows_the_verdict(tmp_path):
    """A wrong backend was not trained, so the table shows the reason instead of the ratio."""
    wrong = judge_claim(CLAIM, CASES | {"fp32 769": "wrong: out0 | error 1"}, {}, [])
    append_rows(
        tmp_path / "judge.jsonl", [wrong | {"command": "python -m scripts.judge op=x", "env": ENV}, verdict_of(90)]
    )
    write_report(tmp_path)
    faster = ["norm: triton against eager", "faster", "2 of 2 cases", "tie", f"{10 / 9:.3f}x ({row_interval(90)})"]
    faster += ["16.30 and 16.30", "7.6000 and 7.6000"]
    markdown, html = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    newest, oldest = [line for line in markdown.splitlines() if line.startswith("| norm: ")]
    assert [cell.strip() for cell in newest.split("|")[1:-1]] == faster
    assert re.search(r"\| wrong +\| 2 of 3 cases +\| +\| fp32 769: wrong: out0 \\\| error 1 +\| +\| +\|$", oldest)
    assert re.findall(r'<td data-head="(?!command)[\w ]+">(.*)</td>', html)[:7] == faster
    assert 'data-command="python -m scripts.judge op=x"' in html


def row_interval(ms):
    ratio = verdict_of(ms)["ratio"]
    return f"{ratio['low']:.3f} to {ratio['high']:.3f}"


def test_training_swaps_one_op_and_nothing_else():
    gpu = torch.device("cuda")
    assert training_words(CLAIM, gpu, ["model=gpt2_350m"])[-2:] == ["kernels=triton", "model=gpt2_350m"]
    assert "kernels=eager" in training_words(CLAIM, CPU, [])
    compiled = CLAIM._replace(against="compile")
    assert "kernels=compile" in training_words(compiled, gpu, [])
    for claim, words in (
        (CLAIM, "kernels.norm=eager,triton"),
        (compiled, "kernels.norm=eager,triton"),
        (Claim("attention", "triton", "flash"), "attn=flash,triton"),
    ):
        assert choose_backends(claim, *claim.backends) == words


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (Claim("decode", "triton", "blocks"), "op=decode: python -m scripts.generate -m kernels.decode="),
        (Claim("nrom", "triton", "eager"), "op=nrom: choose norm, linear"),
        (Claim("norm", None, "eager"), "impl is missing: name the backend of norm to judge"),
        (Claim("norm", "none", "eager"), "impl=none: no file kernels/norm/none.py; there are auto, eager, "),
        (Claim("norm", "triton", "none"), "against=none: no file kernels/norm/none.py"),
        (Claim("norm", "eager", "compile"), "impl=eager against=compile: eager is already its baseline"),
        (Claim("norm", "eager", "eager"), "impl=eager against=eager: name two different backends"),
    ],
)
def test_a_claim_without_two_backends_is_an_error(claim, message):
    with pytest.raises((UserError, KernelError)) as error:
        check_claim(claim)
    assert str(error.value).startswith(message)


def test_every_case_is_probed_in_fp32_and_bf16(monkeypatch):
    groups = []

    def answer(probes, device, limit):
        groups.extend(probes)
        return [["ok"] * len(group) for group in probes]

    monkeypatch.setattr(claims, "run_probes", answer)
    statuses = probe_cases(CLAIM, recipe("bf16"), 64, CPU, 60)
    probes = [probe for group in groups for probe in group]
    assert len(statuses) == len(probes) == 2 * (len(contract("norm").CASES) + 1) + 1
    assert {"fp32 768", "bf16 small_weights", "bf16 768 compiled"} <= statuses.keys()
    assert list(statuses)[-1] == "bf16 training"
    assert [probe.dtype for probe in probes].count(torch.float32) == len(contract("norm").CASES) + 1
    assert sum(probe.compiled for probe in probes) == 2


def test_the_cases_run_in_equal_groups_and_keep_their_answers(monkeypatch):
    """Compilation takes most of a probe's time, on one core. So several processes share the cases."""
    monkeypatch.setattr(claims, "GROUPS", 5)
    groups = []

    def answer(probes, device, limit):
        groups.extend(probes)
        return probes  # the status of a probe is the probe itself

    monkeypatch.setattr(claims, "run_probes", answer)
    statuses = probe_cases(CLAIM, recipe("bf16"), 64, CPU, 60)
    sizes = [len(group) for group in groups]
    assert len(sizes) == 5
    assert max(sizes) - min(sizes) <= 1
    for case, shape in contract("norm").CASES.items():
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            probe = statuses[f"{precision} {case}"]
            assert (probe.shape, probe.dtype, probe.compiled) == (shape, dtype, False)


def recipe(precision, documents=False):
    model = GPTConfig(n_layer=1, n_head=2, n_embd=64, block_size=64, vocab_size=256, pos="rope", bias=True, dropout=0.0)
    return Recipe(model, KernelsConfig(), AttnConfig("sdpa"), None, precision, 1, documents)


@pytest.mark.parametrize(
    ("op", "precision", "documents", "dtype", "arguments"),
    [
        ("norm", "fp32", False, torch.float32, {"residual_dtype": torch.float32}),
        ("norm", "amp", False, torch.bfloat16, {"residual_dtype": torch.float32}),
        ("norm", "bf16", False, torch.bfloat16, {"residual_dtype": torch.bfloat16}),
        ("mlp", "fp8", False, torch.bfloat16, {"fp8": True}),
        ("attention", "bf16", True, torch.bfloat16, {"documents": [64]}),
    ],
)
def test_the_precision_of_the_training_reaches_the_last_probe_and_the_benchmark(
    monkeypatch, op, precision, documents, dtype, arguments
):
    monkeypatch.setattr(claims, "run_probes", lambda groups, *_: groups)  # the status of a probe is the probe itself
    monkeypatch.setattr(claims, "measure", lambda *arguments: [arguments])
    claim, training = Claim(op, "triton", "eager"), recipe(precision, documents)
    probe = probe_cases(claim, training, 64, CPU, 60)[f"{precision} training"]
    assert (probe.dtype, probe.shape["shape"][0], arguments.items() <= probe.shape.items()) == (dtype, 1, True)
    _, _, shape, _, dtype_name, _, _ = benchmark_op(claim, training, (4, 64), 1, CPU)
    assert (claims.DTYPES[dtype_name], shape["shape"][0], arguments.items() <= shape.items()) == (dtype, 4, True)


def test_a_setting_that_does_not_reach_the_op_is_named():
    """fp8 changes products and documents change attention, so a norm knows neither."""
    assert [line.partition(" ")[0] for line in ignored_settings("norm", recipe("fp8", documents=True))] == [
        "precision=fp8",
        "data.mask_documents=true",
    ]
    assert ignored_settings("mlp", recipe("fp8")) == ignored_settings("attention", recipe("bf16", True)) == []
