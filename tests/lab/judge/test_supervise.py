"""train.py proof=true with a kernel of the user: a worker runs it, and train.py's own process proves it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab.bench import new_backends
from lab.bench.new_backends import WrongKernel
from lab.channel import CHANNEL
from lab.judge import supervise
from lab.judge.sandbox import isolation
from lab.judge.supervise import check_cases, take_files, takes_over
from lab.proof import Witness
from lab.recipe import Recipe
from runtime.config import UserError
from tests.lab.bench.test_new_backends import GOOD
from tests.test_train import config, row

CPU = torch.device("cpu")
QUICK = "device=cpu", "model=tiny", "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "train.batch_size=2"
QUICK += "train.block_size=16", "train.tokens_per_step=32", "train.max_steps=12", "precision=fp32"


@pytest.fixture
def mine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(GOOD)
    return "kernels.norm=mine.py"


@pytest.mark.parametrize("words", [["proof=true"], ["kernels.norm=mine.py", "proof=false"]])
def test_kernels_of_this_repo_and_a_run_without_a_proof_need_no_worker(mine, words):
    assert takes_over(config(*QUICK, *words)) is False


def test_a_worker_trains_itself_and_remembers_the_functions_before_the_kernels(mine, monkeypatch):
    monkeypatch.setenv(CHANNEL, "5")
    monkeypatch.setattr(Witness, "functions", {})
    assert takes_over(config(*QUICK, mine, "proof=true")) is False
    assert "time.perf_counter" in Witness.functions


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("model.dropout=0.1", "model.dropout > 0 lets every backend draw random numbers of its own"),
        ("train.max_minutes=5", "with train.max_minutes the schedule depends on the speed"),
    ],
)
def test_a_run_that_cannot_be_compared_is_an_error_before_it_starts(mine, word, reason):
    with pytest.raises(UserError) as error:
        takes_over(config(*QUICK, mine, "proof=true", word))
    assert str(error.value) == f"proof=true cannot compare this run with norm=mine.py: {reason}; pass proof=false"
    assert not Path("out").exists()


def test_a_proof_takes_one_process(mine, monkeypatch):
    monkeypatch.setattr(supervise, "world_size", lambda: 2)
    with pytest.raises(UserError, match=r"norm=mine.py: a proof takes one process; pass proof=false"):
        takes_over(config(*QUICK, mine, "proof=true"))


def test_a_copy_without_git_says_why_its_kernels_are_new(monkeypatch):
    """Then the kernels of this repo are judged, too, and a proof takes one process."""
    monkeypatch.setattr(supervise, "world_size", lambda: 2)
    for module in (supervise, new_backends):
        monkeypatch.setattr(module, "tracked_files", frozenset)
    with pytest.raises(UserError, match=r"norm=eager, .* \(git tracks no file here, so all kernels count as new"):
        takes_over(config(*QUICK, "proof=true"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"narrow": "unavailable: no width of 5"}, None),
        ({"narrow": "wrong: out0: error 1"}, "(narrow: wrong: out0: error 1)"),
        ({"narrow": "undecided: no answer within 120 s"}, "(narrow: undecided: no answer within 120 s)"),
        ({"training": "unavailable: no width of 32"}, "(training: unavailable: no width of 32)"),
    ],
)
def test_every_case_and_the_call_of_the_training_are_checked_before_the_run(monkeypatch, tmp_path, changes, message):
    """Also those of an optimizer, which no model calls."""
    new = {"norm": "mine.py", "adamw": "other.py"}
    seen = []

    def answer(groups, device, limit, folder):
        seen.extend(groups)
        return [
            dict.fromkeys(group, "ok: torch") | (changes if number == 0 else {}) for number, group in enumerate(groups)
        ]

    monkeypatch.setattr(supervise, "judge_cases", answer)
    cfg = config(*QUICK)
    if message:
        with pytest.raises(WrongKernel) as error:
            check_cases(cfg, Recipe.of(cfg), new, CPU, tmp_path)
        assert str(error.value) == f"norm=mine.py breaks the contract of kernels/norm/__init__.py {message}"
        return
    checks = check_cases(cfg, Recipe.of(cfg), new, CPU, tmp_path)
    norm, adamw = seen
    assert (norm["training"].impl, norm["training"].shape["shape"]) == ("mine.py", (1, 16, 32))
    assert {probe.op for probe in adamw.values()} == {"adamw"}
    right = len(norm) - len(changes)
    assert checks == {
        "norm": f"ok in {right} of {len(norm)} cases",
        "adamw": f"ok in {len(adamw)} of {len(adamw)} cases",
    }


def logged_run(folder):
    lines = []
    return SimpleNamespace(folder=folder, log=lambda step, figures: lines.append((step, figures)), lines=lines)


def test_the_files_of_the_worker_become_those_of_the_run(tmp_path):
    source, run = tmp_path / "worker", logged_run(tmp_path / "run")
    (source / "checkpoints").mkdir(parents=True)
    run.folder.mkdir()
    (source / "sample.txt").write_text("text")
    (source / "other.txt").write_text("text")
    (source / "memory.pickle").symlink_to(source / "other.txt")
    (source / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 5.0}\n{"step": 2, "train/loss": 4.0}\n' + "[" * 10**5
    )
    take_files(source, run)
    assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoints", "sample.txt"]
    assert run.lines == [(1, {"train/loss": 5.0}), (2, {"train/loss": 4.0})]


def test_a_link_in_place_of_the_workers_folder_moves_no_files(tmp_path):
    """This process may write where the worker may not."""
    other, run = tmp_path / "other_run", logged_run(tmp_path / "run")
    (other / "checkpoints").mkdir(parents=True)
    run.folder.mkdir()
    (tmp_path / "worker").symlink_to(other)
    take_files(tmp_path / "worker", run)
    assert (other / "checkpoints").exists()
    assert list(run.folder.iterdir()) == []


MINE = """
from kernels.norm import eager

calls = []


def norm(x, *rest, **more):
    if x.shape[-1] == 32:
        calls.append(1)
    if len(calls) > 20:
        CHANGE
    return eager.norm(x, *rest, **more)
"""


@pytest.mark.exhaustive
def test_the_run_of_a_right_kernel_has_a_proof_and_that_of_a_wrong_one_has_none(hotswap, mine, monkeypatch):
    """The wrong kernel is right while it is alone: it counts its calls. A run may be without an evaluation."""
    all_cases = supervise.case_probes
    monkeypatch.setattr(supervise, "case_probes", lambda *of: dict(list(all_cases(*of).items())[:2]))
    words = *QUICK, mine, "proof=true", "train.sample_tokens=0", "train.eval_batches=1"
    Path("mine.py").write_text(MINE.replace("CHANGE", "pass"))
    code, out, err = hotswap(*words, "out_dir=right", "train.eval_every=0")
    assert (code, err) == (0, "")
    right = row("right")
    assert (right["isolation"], right["checks"]) == (isolation(), {"norm": "ok in 3 of 3 cases"})
    assert (right["status"], right["parity"]["ok"], right["parity"]["steps"]) == ("ok", True, 12)
    assert right["kernels"]["norm"].startswith("mine.py (")
    assert right["val/loss"] is None
    assert "parity   against eager PyTorch from the run's own states" in out
    assert not Path("right/judge").exists()
    Path("mine.py").write_text(MINE.replace("CHANGE", "more['eps'] = 0.3"))
    code, out, err = hotswap(*words, "out_dir=wrong", "train.eval_every=6")
    assert (code, row("wrong")["status"].partition(":")[0]) == (1, "wrong")
    assert "the losses of 12 steps are off by" in err
    assert row("wrong")["parity"]["ok"] is False
