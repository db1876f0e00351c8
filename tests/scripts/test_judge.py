"""`python -m scripts.judge`: the exit code is the verdict."""

import json
import math
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lab.bench.probe import Probe
from lab.judge import sandbox
from lab.judge.claim import Claim, make_probes
from lab.judge.sandbox import PROCESSES, Ended, Sandbox
from lab.recipe import Recipe
from scripts import judge as script
from tests.lab.judge.test_judge import CASES, bench, evidence_of, run
from tests.lab.judge.test_sandbox import START
from tests.test_train import config

ARGUMENTS = "op=norm", "impl=triton", "against=eager", "device=cpu"
CPU = torch.device("cpu")


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command with made-up evidence: command(evidence, arguments) -> (exit code, stdout, stderr, trained).

    `trained` has the arguments of gather_evidence(), which trains; it is empty without a training.
    """
    monkeypatch.chdir(tmp_path)

    def call(evidence, *arguments):
        trained = {}

        def gather(claim, words, config, recipe, env, device, repeats, rounds, limit, folder):
            trained.update(claim=claim, words=words, config=config, repeats=repeats, rounds=rounds, folder=folder)
            return evidence

        monkeypatch.setattr(script, "probe", lambda *_: evidence.statuses)
        monkeypatch.setattr(script, "gather_evidence", gather)
        monkeypatch.setattr(script, "stamp_packages", dict)  # reads 90,000 files where there are no namespaces
        return *called("judge.py", script.main_with_training, *ARGUMENTS, "out_dir=judged", *arguments), trained

    return call


@pytest.mark.parametrize(("ms", "code"), [(80, 0), (100, 2), (120, 3)])
def test_the_exit_code_is_the_verdict(command, tmp_path, ms, code):
    got, out, err, trained = command(evidence_of(ms), "--", "model=tiny", "train.max_steps=5")
    assert (got, err) == (code, "")
    assert trained["claim"] == Claim("norm", "triton", "eager")
    assert trained["words"][-3:] == ["kernels=eager", "model=tiny", "train.max_steps=5"]
    assert (trained["config"].kernels.norm, trained["config"].train.max_steps) == ("eager", 5)
    assert (trained["repeats"], trained["rounds"], trained["folder"]) == (3, 10, Path("judged"))
    folder = tmp_path / "judged"
    assert (folder / "judge.md").read_text() in out
    [row] = map(json.loads, (folder / "judge.jsonl").read_text().splitlines())
    assert row["verdict"] == {0: "faster", 2: "tie", 3: "slower"}[code]
    words = "op=norm impl=triton against=eager device=cpu -- model=tiny train.max_steps=5"
    assert row["command"] == f"python judge.py {words}"
    assert row["isolation"] == sandbox.isolation()
    assert f"workers  {sandbox.isolation()}\nright    in 2 cases\n" in out
    assert (folder / "judge.png").exists()


def test_a_wrong_backend_is_not_trained(command):
    code, out, err, trained = command(evidence_of(80, cases=CASES | {"fp32 769": "wrong: out0: error 1"}))
    assert (code, err, trained) == (4, "", {})
    assert "**norm=triton is wrong: fp32 769: wrong: out0: error 1**" in out


def test_a_case_without_an_answer_gives_no_verdict(command, tmp_path):
    code, _, err, trained = command(evidence_of(80, cases=CASES | {"fp32 769": "undecided: no answer within 120 s"}))
    assert (code, trained) == (1, {})
    reason = "fp32 769: undecided: no answer within 120 s; raise limit=SECONDS, or free memory"
    assert err == f"error: no verdict: {reason}\n"
    assert f"could not be judged: {reason}" in (tmp_path / "judged/judge.md").read_text()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"losses": {"gap": 1.0, "bound": 0.1}}, 4, ""),
        ({"impossible": "it is too fast"}, 1, "error: no verdict: too good to be true: it is too fast\n"),
        ({"repeats": 2}, 1, "error: no verdict: faster needs 3 runs of each side, and 2 ran: repeats=3\n"),
    ],
)
def test_what_the_training_shows_decides_the_exit_code(command, tmp_path, options, code, message):
    got, _, err, _ = command(evidence_of(80, **options))
    assert (got, err) == (code, message)
    assert (tmp_path / "judged/judge.md").exists()


@pytest.mark.parametrize("cases", [CASES, CASES | {"fp32 769": "undecided: no answer within 120 s"}])
def test_a_backend_that_changes_files_of_the_repo_is_wrong(command, monkeypatch, cases):
    """It could have changed the judge, or PyTorch."""
    contents = iter([{"lab/judge/verdict.py": "a", "train.py": "b"}, {"lab/judge/verdict.py": "c", "train.py": "b"}])
    monkeypatch.setattr(script, "digest_repo", lambda: next(contents))
    code, out, err, _ = command(evidence_of(80, cases=cases))
    assert (code, err) == (4, "")
    assert "wrong: files of the repo or of packages changed while it ran: lab/judge/verdict.py**" in out


def test_a_backend_that_changes_installed_packages_is_wrong(command, monkeypatch):
    monkeypatch.setattr(script, "changed_packages", lambda before: ["torch/nn/functional.py"])
    code, out, _, _ = command(evidence_of(80))
    assert code == 4
    assert "changed while it ran: torch/nn/functional.py**" in out


def test_a_backend_that_cannot_run_here_is_an_error(command):
    nowhere = dict.fromkeys(("fp32 768", "fp32 training"), "unavailable: it needs an NVIDIA GPU")
    code, _, err, trained = command(evidence_of(80, cases=nowhere))
    assert (code, trained) == (1, {})
    assert err == "error: norm=triton cannot run this training: unavailable: it needs an NVIDIA GPU\n"


def test_a_baseline_that_cannot_run_here_is_an_error_before_the_probes(command):
    code, out, err, trained = command(evidence_of(80), "op=attention", "impl=math", "against=cudnn")
    assert (code, out, trained) == (1, "", {})
    assert err == "error: attention=cudnn cannot run here: cuDNN needs an NVIDIA GPU; on a CPU choose attn=sdpa\n"


def test_a_backend_that_cannot_run_the_training_is_not_trained(command):
    """The arguments after the dashes decide what the training calls, so they also decide what is tested."""
    cases = CASES | {"fp8 training": "unavailable: mlp takes no fp8"}
    code, out, err, trained = command(evidence_of(80, cases=cases), "--", "precision=fp8")
    assert (code, trained) == (1, {})
    assert err == "error: norm=triton cannot run this training: unavailable: mlp takes no fp8\n"
    assert "note     precision=fp8 changes no product of norm, which computes in bf16 in this training\n" in out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("precision=int4", "precision=int4: choose fp32, amp, bf16, fp8"),
        ("train.step=5", "unknown key train.step; did you mean train.max_steps?"),
    ],
)
def test_a_wrong_argument_of_the_training_is_an_error_before_the_probes(command, word, message):
    code, out, err, trained = command(evidence_of(80), "--", word)
    assert (code, out, err, trained) == (1, "", f"error: {message}\n", {})


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("model.dropout=0.1", "model.dropout > 0 lets every backend draw random numbers of its own"),
        ("train.on_nonfinite=skip", "train.on_nonfinite=skip hides steps"),
        ("train.max_minutes=5", "with train.max_minutes the schedule depends on the speed"),
        ("train.resume=auto", "train.resume and train.stop_after make a part of a run"),
    ],
)
def test_a_training_that_cannot_be_compared_is_an_error_before_the_probes(command, word, reason):
    code, out, err, trained = command(evidence_of(80), "--", word)
    assert (code, out, trained) == (1, "", {})
    assert err == f"error: this training cannot be compared, so it gives no verdict: {reason}\n"


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, ""), (signal.SIGINT, 130, "interrupted\n")],
    ids=["TERM", "HUP", "INT"],
)
def test_a_signal_ends_the_worker_and_there_is_no_verdict(called, monkeypatch, tmp_path, number, code, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox, "isolation", lambda: PROCESSES)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
    started = []

    def probe(probes, device, limit, folder):
        with Sandbox(["-c", START + "answer(); time.sleep(600)"], folder / "cases-0", limit) as worker:
            started.append(worker)
            worker.receive()
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            worker.receive()

    monkeypatch.setattr(script, "probe", probe)
    begin = time.monotonic()
    got, _, err = called("judge.py", script.main_with_training, *ARGUMENTS, "out_dir=judged", "limit=60")
    assert (got, err) == (code, message)
    assert time.monotonic() - begin < 30
    [worker] = started
    assert worker.process.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "judged").iterdir()] == ["cases-0"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_cases_run_in_equal_groups_and_keep_their_order(monkeypatch, tmp_path, kind):
    """Compilation takes most of a probe's time, on one core. So several workers share the cases."""
    seen = []

    def answer(groups, device, limit, folder):
        seen.extend(groups)
        return [{case: f"ok: {probe.impl}" for case, probe in group.items()} for group in groups]

    monkeypatch.setattr(script, "judge_cases", answer)
    probes = {f"case {number}": Probe("norm", f"mine{number}", {}, torch.float32) for number in range(21)}
    statuses = script.probe(probes, torch.device(kind), 60, tmp_path)
    assert list(statuses.items()) == [(f"case {number}", f"ok: mine{number}") for number in range(21)]
    sizes = [len(group) for group in seen]
    assert len(sizes) == {"cpu": 2, "cuda": 8}[kind]
    assert max(sizes) - min(sizes) <= 1


def row(impl, ms, **changes):
    losses = {"losses": [5.0, 4.0], "perf/step_ms": ms}
    return run(impl, ms, changes.pop("status", "ok")) | losses | changes


def alone(impl, **changes):
    errors = {f"error/{name}{of}": 1e-7 for name in ("out", "gradients") for of in ("", "/eager")}
    return bench(impl, 1.0) | {"both/floor_ms": 0.5, "launched/ms": None, "no_graph": None} | errors | changes


@pytest.fixture
def gather(monkeypatch, tmp_path):
    """Gather the evidence of a run of each backend: gather(row of triton, row of eager, the figures alone)."""
    cfg = config("model=tiny", "train.batch_size=2", "train.tokens_per_step=256", "train.max_steps=24", "device=cpu")
    monkeypatch.setattr(script, "open_dataset", lambda config: None)
    monkeypatch.setattr(script, "slower_than_before", lambda row, slug: None)

    def call(judged, baseline, benchmark=lambda call, names, *_: [alone(name) for name in names], flops=1e15):
        monkeypatch.setattr(script, "train_in_turns", lambda *_: {"triton": judged, "eager": baseline})
        monkeypatch.setattr(script, "benchmark", benchmark)
        monkeypatch.setattr(script, "measured_flops", lambda device, dtype: flops)
        claim = Claim("norm", "triton", "eager")
        env = {"device": "a CPU"}
        return script.gather_evidence(claim, [], cfg, Recipe.of(cfg), env, CPU, 1, 1, 60, tmp_path)

    return call


def test_the_evidence_of_a_training_has_its_runs_its_losses_and_the_figures_alone(gather, monkeypatch):
    judged, baseline = [row("triton", 90)], [row("eager", 100)]
    evidence = gather(judged, baseline)
    assert evidence.runs == {"triton": judged, "eager": baseline}
    assert [bench["impl"] for bench in evidence.benchmark] == ["triton", "eager"]
    assert evidence.losses["gap"] == 0 < evidence.losses["bound"]
    assert (evidence.impossible, evidence.notes) == (None, ())
    monkeypatch.setattr(script, "slower_than_before", lambda row, slug: f"{slug} was faster")
    grown = [row("triton", 90), row("triton", 90, memory_growth=3 * 2**20)]
    evidence = gather(grown, [row("eager", 100)] * 2)
    assert evidence.notes == ("a-cpu was faster", "allocated memory grows by 3.0 MiB in each window")


@pytest.mark.parametrize(
    "runs",
    [
        ([row("triton", 90, status="wrong: it is off")], [row("eager", 100)]),
        ([], [row("eager", 100, status="failed: exit code 1")]),
    ],
)
def test_after_a_run_that_is_not_ok_nothing_is_measured_alone(gather, runs):
    evidence = gather(*runs, benchmark=None)
    assert (evidence.benchmark, evidence.losses, evidence.impossible) == ([], None, None)


def test_runs_of_one_window_have_no_speed(gather):
    """The first window is the warm-up."""
    judged, baseline = (
        {**row(impl, 90), "perf/laps_s": [], "perf/tokens_per_sec": None} for impl in ("triton", "eager")
    )
    evidence = gather([judged], [baseline], benchmark=None)
    assert evidence.losses["gap"] == 0
    claim = Claim("norm", "triton", "eager")
    assert script.judge_claim(claim, evidence._replace(statuses=CASES))["reason"] == "the runs are too short to compare"


@pytest.mark.parametrize(
    "error",
    [Ended("no answer within 60 s"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")],
)
def test_without_figures_of_the_op_alone_the_training_still_decides(gather, error):
    def fail(*_):
        raise error

    evidence = gather([row("triton", 90)], [row("eager", 100)], benchmark=fail)
    assert (evidence.benchmark, evidence.losses["gap"]) == ([], 0)
    assert evidence.notes == (f"no figures of norm alone: {error}",)


def test_a_speed_that_cannot_be_true_is_evidence(gather):
    slow_matmul = gather([row("triton", 90)], [row("eager", 100)], flops=1e6)
    assert slow_matmul.impossible.startswith("it trains at ")

    def benchmark(call, names, *_):
        return [alone(name, **{"both/floor_ms": 2.0}) for name in names]

    assert gather([row("triton", 90)], [row("eager", 100)], benchmark).impossible.startswith("alone it takes 1 ")


@pytest.mark.parametrize(("ms", "is_possible"), [(78, True), (76, False), (120, True)])
def test_a_step_cannot_save_more_than_the_op_takes(gather, ms, is_possible):
    """A step has 9 calls of a norm, 1 ms each. It may save twice as much, and 5% of a step of 100 ms."""
    evidence = gather(3 * [row("triton", ms)], 3 * [row("eager", 100)])
    reason = f"a step takes {100 - ms} ms less, and all 9 calls of the baseline's norm take 9 ms alone"
    assert evidence.impossible == (None if is_possible else reason)


def test_without_a_cuda_graph_a_call_takes_as_long_as_its_launches(gather):
    def benchmark(call, names, *_):
        return [alone(name, **{"launched/ms": 4.0, "no_graph": "Error: it reads a result"}) for name in names]

    evidence = gather(3 * [row("triton", 76)], 3 * [row("eager", 100)], benchmark)
    assert evidence.impossible is None
    note = "norm={} alone: Python launched each call, because no CUDA graph took it: Error: it reads a result"
    assert evidence.notes == (note.format("triton"), note.format("eager"))


def test_runs_that_are_not_faster_save_nothing(gather):
    """On a busy machine steps vary. Two runs of each side are no verdict, and these three are a tie."""
    assert gather(2 * [row("triton", 20)], 2 * [row("eager", 100)]).impossible is None
    assert gather([row("triton", ms) for ms in (20, 20, 400)], 3 * [row("eager", 100)]).impossible is None


def test_a_backend_that_fails_alone_may_save_no_more_either(gather):
    def fail(call, names, *_):
        if names == ["triton"]:
            raise Ended("the process ended, exit code 3")
        return [alone("eager")]

    evidence = gather(3 * [row("triton", 20)], 3 * [row("eager", 100)], fail)
    assert evidence.impossible.startswith("a step takes 80 ms less")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"both/floor_ms": None}, None),
        ({"both/floor_ms": 1.04}, None),
        ({"both/floor_ms": 1.06}, "alone it takes 1 ms, and the work that it cannot avoid 1.06 ms"),
        ({"error/out": 3.9e-4, "error/out/eager": 1e-4}, None),
        (
            {"error/out": 5e-4, "error/out/eager": 1e-4},
            "the outputs of its timed calls are off by 0.0005, eager's by 0.0001",
        ),
        ({"error/gradients": 1.0}, "the gradients of its timed calls are off by 1, eager's by 1e-07"),
        ({"error/gradients": math.nan}, "the gradients of its timed calls are off by nan, eager's by 1e-07"),
    ],
)
def test_figures_alone_that_cannot_be_true_are_named(changes, reason):
    """A call that is timed is a call that is right, and none is faster than the work that it cannot avoid."""
    assert script.impossible_alone(alone("triton", **changes)) == reason


@pytest.mark.exhaustive
def test_a_tiny_training_on_a_cpu(called, monkeypatch, tmp_path):
    """Every part is real, but most cases are left out. The verdict is the machine's.

    With one run of each side it is not `faster`. On a busy CPU the speed may be too good to be true: the matmul and the
    copy that bound it are measured at another moment, when this process may have half of a core.
    """

    def some_probes(*arguments):
        probes = list(make_probes(*arguments).items())
        return dict([*probes[:4], *probes[-2:]])

    monkeypatch.setattr(script, "make_probes", some_probes)
    monkeypatch.chdir(tmp_path)
    arguments = "op=loss", "impl=torch_chunked", "against=eager", "device=cpu", "repeats=1", "rounds=1"
    small = "model.n_layer=1", "train.batch_size=2", "train.tokens_per_step=256", "train.max_steps=22"
    code, out, err = called("judge.py", script.main_with_training, *arguments, "out_dir=judged", "--", *small)
    reasons = (
        "faster needs 3 runs of each side, and 1 ran: repeats=3",
        "too good to be true: (it trains at|alone it takes) .*",
    )
    no_verdict = re.fullmatch(f"error: no verdict: ({'|'.join(reasons)})\n", err)
    assert (code, err) in [(2, ""), (3, "")] or (code == 1 and no_verdict)
    assert ("**loss=torch_chunked is right" in out) == (code != 1)
    assert "Eager PyTorch in fp32 repeated 22 steps of them from their own states" in out
