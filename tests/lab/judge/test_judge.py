"""The verdict from rows, and the training that the rows come from."""

import re
import sys

import pytest
import torch

from kernels.registry import AttnConfig, KernelError, KernelsConfig, contract
from lab.bench.probe import case_probes
from lab.judge.claim import (
    BATCH_TOKENS,
    Claim,
    check_claim,
    choose_backends,
    ignored_settings,
    make_probes,
    training_call,
    training_words,
    wrong_answers,
)
from lab.judge.verdict import Evidence, judge_claim, page, speed_figure, verdict_table
from lab.recipe import Recipe
from lab.report.page import write_report
from lab.rows import append_rows
from model.config import GPTConfig
from runtime.config import UserError

CPU = torch.device("cpu")
CLAIM = Claim("norm", "triton", "eager")
ENV = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "git_commit": "5918f41a4eb37d063a8"}
LOSSES = {"gap": 1e-4, "bound": 3e-2}  # of the two backends, and of two seeds
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
        row |= {"parity": {"ok": True, "steps": 40, "loss_error": 1e-3, "loss_bound": 2e-3}}
    return row


def bench(impl, ms):
    figures = {"both/ms": ms, "both/ms/p20": 0.99 * ms, "both/ms/p80": 1.01 * ms, "both/of_floor": 0.9}
    return {"impl": impl, **figures, "extra_gib": None, "error/out": 1e-7, "error/gradients": 1e-7}


def evidence_of(ms, alone_ms=1.0, base_ms=100.0, repeats=3, cases=CASES, **more):
    """The evidence on a norm whose step takes `ms`, against one whose step takes `base_ms`."""
    runs = {"eager": [run("eager", base_ms)] * repeats, "triton": [run("triton", ms)] * repeats}
    return Evidence(cases, runs, [bench("triton", alone_ms), bench("eager", 1.0)], **{"losses": LOSSES} | more)


def verdict(evidence):
    about = {"command": "python -m scripts.judge op=norm impl=triton", "env": ENV}
    return judge_claim(CLAIM, evidence) | about


def verdict_of(ms, **options):
    return verdict(evidence_of(ms, **options))


@pytest.mark.parametrize(("ms", "expected"), [(90, "faster"), (99.9, "tie"), (100.1, "tie"), (110, "slower")])
def test_the_verdict_is_that_of_the_training(ms, expected, tmp_path):
    """Alone the op is twice as slow, which does not count. A difference of 0.1% is below what a comparison resolves."""
    row = verdict_of(ms, alone_ms=2.0)
    assert row["verdict"] == expected
    assert row["ratio"]["value"] == pytest.approx(100 / ms)
    text = page(row)
    covered = "in the 2 of 3 cases that it covers"
    assert f"**norm=triton is right {covered}. Training with it runs at {100 / ms:.3f}x the speed of training " in text
    assert f"), which is {expected.replace('tie', 'a tie')}. Alone, the op runs at 0.500x the speed of eager.**" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["tokens/s in training", f"{65_536e3 / ms:,.0f}", "655,360"] in cells
    assert ["error of the losses", "1.0e-03", "1.0e-03"] in cells
    assert (
        "The baseline is gpt2_124m, bf16, 64 x 1024 tokens, triton, norm eager, attention flash. Each side has 3 runs "
        "in turns, of 60 steps. Eager PyTorch in fp32 repeated 120 steps of them from their own states, which gives "
        "the errors. The losses of both sides, over the last half of the steps: they are 1.0e-04 apart, and two seeds "
        "of the baseline 3.0e-02."
    ) in text
    assert "Of 3 cases, 2 are ok, 1 is unavailable." in text
    assert "- unavailable: it needs a GPU\n" in text
    assert speed_figure(row, tmp_path / "card.png").read_bytes().startswith(b"\x89PNG")


def test_times_alone_that_overlap_are_a_tie():
    assert "Alone, the op runs as fast as eager.**" in page(verdict_of(90, alone_ms=1.015))


def test_a_backend_that_refuses_no_case_is_right_without_a_count():
    assert "**norm=triton is right. Training with it" in page(verdict_of(90, cases={"fp32 768": "ok: torch"}))


def test_the_notes_and_the_isolation_are_on_the_page():
    row = verdict_of(90, notes=("the baseline was faster before", "memory grows"))
    text = page(row | {"isolation": "bubblewrap: namespaces"})
    assert "- unavailable: it needs a GPU\n- note: the baseline was faster before\n- note: memory grows\n" in text
    assert "\nThe backend ran in workers (bubblewrap: namespaces). " in text
    assert "ran in workers" not in page(row)  # a row of an older version


@pytest.mark.parametrize(("repeats", "expected"), [(1, "none"), (2, "none"), (3, "faster")])
def test_faster_needs_three_runs_of_each_side(repeats, expected):
    row = verdict_of(80, repeats=repeats)
    assert row["verdict"] == expected
    if expected == "none":
        reason = f"faster needs 3 runs of each side, and {repeats} ran: repeats=3"
        assert row["reason"] == reason
        text = page(row)
        assert f"**norm=triton passes every case that it covers, but gets no verdict: {reason}**" in text
        assert f"Each side has {'1 run' if repeats == 1 else '2 runs in turns'}, of 60 steps." in text


def test_slower_needs_no_three_runs():
    """Nobody gains from a backend that only seems slow."""
    assert verdict_of(120, repeats=1)["verdict"] == "slower"


@pytest.mark.parametrize(("gap", "is_wrong"), [(0.03, False), (0.031, True), (float("nan"), True)])
def test_losses_further_apart_than_two_seeds_are_wrong(gap, is_wrong):
    """Wrong losses come before a speed that cannot be true."""
    row = verdict_of(80, losses={"gap": gap, "bound": 0.03}, impossible="it is too fast")
    assert row["verdict"] == ("wrong" if is_wrong else "none")
    if is_wrong:
        reason = f"its losses leave those of eager: they are {gap:.1e} apart, and two seeds of the baseline 3.0e-02"
        assert row["reason"] == reason
        assert f"**norm=triton is wrong: {reason}**" in page(row)
        assert "tokens/s" not in page(row)


def test_a_speed_that_cannot_be_true_gives_no_verdict():
    row = verdict_of(1, impossible="it trains at 9e+03 TFLOP/s")
    assert (row["verdict"], row["reason"]) == ("none", "too good to be true: it trains at 9e+03 TFLOP/s")
    assert "ratio" not in row
    assert "gets no verdict: too good to be true: it trains at 9e+03 TFLOP/s**" in page(row)


def test_a_side_without_a_run_gives_no_verdict():
    evidence = evidence_of(90)
    row = verdict(evidence._replace(runs=evidence.runs | {"triton": []}))
    assert (row["verdict"], row["reason"]) == ("none", "a side has no run")


def test_a_wrong_case_is_the_verdict_and_no_speed_is_shown():
    statuses = CASES | {"fp32 769": "wrong: out0: error 1", "fp32 narrow": "failed: exit code 1"}
    row = verdict(Evidence(statuses, {}, []))
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
    row = verdict(Evidence(statuses, {}, []))
    assert [line for line in page(row).splitlines() if line.startswith("- ")] == [
        "- fp32 769, bf16 769: failed: exit code 1",
        "- fp32 narrow: wrong: out0: error 1",
    ]


def test_a_case_without_an_answer_is_neither_right_nor_wrong():
    statuses = CASES | {"fp32 769": "undecided: no answer within 120 s", "fp32 8192": "undecided: out of memory"}
    row = verdict(Evidence(statuses, {}, []))
    reason = "fp32 769: undecided: no answer within 120 s (and 1 more); raise limit=SECONDS, or free memory"
    assert (row["verdict"], row["reason"], wrong_answers(statuses)) == ("none", reason, [])
    text = page(row)
    assert f"**norm=triton could not be judged: {reason}**" in text
    assert "- fp32 8192: undecided: out of memory\n" in text


@pytest.mark.parametrize(
    ("status", "answer"),
    [("wrong: the losses are off", "wrong"), ("oom", "none"), ("failed: no answer within 600 s", "none")],
)
def test_a_run_that_is_not_ok_decides_the_verdict(status, answer):
    """Its figures are not compared, so `losses` has none."""
    runs = {"eager": [run("eager", 100)], "triton": [run("triton", 90, status)]}
    row = verdict(Evidence(CASES, runs, []))
    assert (row["verdict"], row["reason"]) == (answer, status)
    assert page(row).count(status) == 1


def test_a_wrong_run_of_the_baseline_gives_no_verdict():
    """The claim is about the other backend, and about that one nothing is known."""
    runs = {"eager": [run("eager", 100, "wrong: it changed files")], "triton": [run("triton", 90)]}
    row = verdict(Evidence(CASES, runs, []))
    assert (row["verdict"], row["reason"]) == ("none", "wrong: it changed files")


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
    wrong = judge_claim(CLAIM, Evidence(CASES | {"fp32 769": "wrong: out0 | error 1"}, {}, []))
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
        (Claim("nrom", "triton", "eager"), "op=nrom: choose norm, rms_norm"),
        (Claim("norm", None, "eager"), "impl is missing: name the backend of norm to judge"),
        (Claim("norm", "none", "eager"), "impl=none: no file kernels/norm/none.py; there are auto, cutile, eager, "),
        (Claim("norm", "none.py", "eager"), "impl=none.py: no file none.py in "),
        (
            Claim("norm", "kernels.nrom.eager", "eager"),
            "impl=kernels.nrom.eager: no module kernels.nrom.eager; install ",
        ),
        (Claim("norm", "triton", "none"), "against=none: no file kernels/norm/none.py"),
        (Claim("norm", "eager", "compile"), "impl=eager against=compile: eager is already its baseline"),
        (Claim("norm", "eager", "eager"), "impl=eager against=eager: name two different backends"),
    ],
)
def test_a_claim_without_two_backends_is_an_error(claim, message):
    with pytest.raises((UserError, KernelError)) as error:
        check_claim(claim)
    assert str(error.value).startswith(message)


def test_a_claim_with_a_dotted_name_imports_nothing(monkeypatch, tmp_path):
    """A package may do anything when it is imported, so only a worker imports it."""
    (tmp_path / "strangers/kernels").mkdir(parents=True)
    for folder in (tmp_path / "strangers", tmp_path / "strangers/kernels"):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "strangers/kernels/fast.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for impl in ("strangers.kernels.fast", "strangers.kernels"):
        check_claim(Claim("norm", impl, "eager"))
    with pytest.raises(KernelError, match=r"^impl=strangers.kernels.slow: no module strangers.kernels.slow; install "):
        check_claim(Claim("norm", "strangers.kernels.slow", "eager"))
    assert not [name for name in sys.modules if name.startswith("strangers")]


def test_every_case_is_probed_in_fp32_and_bf16():
    probes = make_probes(CLAIM, recipe("bf16"), (1, 64))
    assert len(probes) == 2 * (len(contract("norm").CASES) + 1) + 1
    assert {"fp32 768", "bf16 small_weights", "bf16 768 compiled"} <= probes.keys()
    assert list(probes)[-1] == "bf16 training"
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for case, probe in case_probes("norm", "triton", dtype).items():
            assert probes[f"{precision} {case}"] == probe
    assert sum(probe.compiled for probe in probes.values()) == 2


@pytest.mark.parametrize(("batch", "is_probed"), [(1, False), (2, True), (BATCH_TOKENS // 64, True), (512, False)])
def test_the_batch_of_the_training_is_probed_if_it_is_small(batch, is_probed):
    """A backend may know the batch size, so one sequence does not show all of it. float64 bounds the size."""
    probes = make_probes(CLAIM, recipe("bf16"), (batch, 64))
    last = [name for name in probes if name in ("bf16 training", "bf16 batch")]
    assert [probes[name].shape["shape"] for name in last] == [(1, 64, 64), (batch, 64, 64)][: 1 + is_probed]


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
def test_the_precision_of_the_training_reaches_the_last_probes_and_the_benchmark(
    op, precision, documents, dtype, arguments
):
    claim, training = Claim(op, "triton", "eager"), recipe(precision, documents)
    probes = make_probes(claim, training, (4, 64))
    calls = [
        (probes[f"{precision} {name}"].shape, probes[f"{precision} {name}"].dtype) for name in ("training", "batch")
    ]
    for (shape, shape_dtype), batch in zip([*calls, training_call(op, training, (4, 64))], (1, 4, 4), strict=True):
        assert (shape_dtype, shape["shape"][0], arguments.items() <= shape.items()) == (dtype, batch, True)


def test_a_setting_that_does_not_reach_the_op_is_named():
    """fp8 changes products and documents change attention, so a norm knows neither."""
    assert [line.partition(" ")[0] for line in ignored_settings("norm", recipe("fp8", documents=True))] == [
        "precision=fp8",
        "data.mask_documents=true",
    ]
    assert ignored_settings("mlp", recipe("fp8")) == ignored_settings("attention", recipe("bf16", True)) == []
