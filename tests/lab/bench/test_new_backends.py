"""The check of a backend that is not part of the repo."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kernels.names import GENERATION_OPS, TRAINING_OPS
from kernels.registry import OPS, AttnConfig, KernelError, KernelsConfig, contract, impls
from lab.bench import new_backends
from lab.bench.new_backends import WrongKernel, check_new_backends
from lab.recipe import Recipe
from model.config import GPTConfig
from model.optim import OptimConfig

OPTIM = OptimConfig(6e-4, 6e-5, 10, 0.1, 0.9, 0.95, 1.0)
CPU = torch.device("cpu")
CHOICE = AttnConfig("sdpa"), CPU
CALLS = {"norm": ({"shape": (1, 8, 96)}, torch.bfloat16)}  # of a model 96 wide
GOOD = """
import torch


def norm(x, residual, weight, bias, eps=1e-5):
    residual = x if residual is None else residual + x
    mean = residual.mean(-1, keepdim=True)
    rstd = torch.rsqrt((residual - mean).square().mean(-1, keepdim=True) + eps)
    return (residual - mean) * rstd * weight + bias, residual
"""
FILES = {
    "good": GOOD,
    "eps": GOOD.replace("eps)", "0.3)"),
    "no_gradient": GOOD.replace("+ bias", "+ bias.detach()"),
    "one_result": GOOD.replace(", residual\n", "\n"),
    "crash": "import os\n\n\ndef norm(x, residual, weight, bias, eps=1e-5):\n    os.abort()\n",
}
CONTRACT = "norm(x, residual, weight, bias, eps=1e-5) -> (y, new_residual) of kernels/norm/__init__.py"
ERRORS = {
    "eps": "(wrong: out0: error ",
    "no_gradient": "(wrong: its backward gives no gradient of bias): ",
    "one_result": "(wrong: it returns 1 instead of 2 tensors): ",
    "crash": "(failed: the process ended, killed by SIGABRT",
}


def test_the_backends_that_git_tracks_are_this_repos(monkeypatch, tmp_path):
    """A file that git does not know is new. Without git every file is."""
    (tmp_path / "kernels/norm").mkdir(parents=True)
    for name in ("triton", "mine", "_part"):
        (tmp_path / f"kernels/norm/{name}.py").touch()
    for module in ("lab.bench.new_backends", "kernels.lookup"):
        monkeypatch.setattr(f"{module}.ROOT", tmp_path / "kernels")
    monkeypatch.setattr(new_backends, "tracked_files", new_backends.tracked_files.__wrapped__)
    assert new_backends.tracked_backends("norm") == []
    for words in (["init", "-q"], ["add", "kernels/norm/triton.py"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert new_backends.tracked_backends("norm") == ["triton"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert new_backends.tracked_backends("norm") == []


@pytest.fixture
def answers(monkeypatch):
    """Answer the probes: answers.statuses has those of each group, and answers.groups what was probed.

    Of norm, no backend is this repo's.
    """
    made_up = SimpleNamespace(statuses=["ok: torch"], groups=[])

    def answer(groups, device, limit):
        made_up.groups += groups
        return [made_up.statuses for _ in groups]

    monkeypatch.setattr(new_backends, "run_probes", answer)
    monkeypatch.setattr(new_backends, "tracked_backends", lambda op: [] if op == "norm" else impls(op))
    return made_up


def test_a_shipped_backend_is_not_checked_and_another_one_before_each_run(answers):
    """Nothing is stored, because a kernel could write the answer."""
    assert check_new_backends(KernelsConfig(), *CHOICE, ops=["mlp", "attention"]) == {}
    assert check_new_backends(KernelsConfig(check=False), *CHOICE) == {}
    assert answers.groups == []
    for _ in range(2):
        assert check_new_backends(KernelsConfig(), *CHOICE) == {"norm": "ok: torch"}
    assert [[(probe.op, probe.impl) for probe in group] for group in answers.groups] == [[("norm", "eager")]] * 2


def test_the_second_probe_is_the_call_of_this_model(answers):
    """A backend may refuse the first case of the contract, but not the model's widths."""
    answers.statuses = ["unavailable: it takes a width of 96 only", "ok: torch"]
    assert check_new_backends(KernelsConfig(), *CHOICE, calls=CALLS) == {"norm": "ok: torch"}
    [[first, own]] = answers.groups
    assert (first.shape, first.dtype) == (next(iter(contract("norm").CASES.values())), torch.float32)
    assert (own.op, own.impl, own.shape, own.dtype) == ("norm", "eager", {"shape": (1, 8, 96)}, torch.bfloat16)


def test_the_model_and_the_precision_of_a_run_make_the_call(monkeypatch):
    calls = {}
    monkeypatch.setattr("lab.recipe.check_new_backends", lambda *arguments: calls.update(arguments[-1]))
    for block_size, length in ((64, 64), (4096, 128)):
        model = GPTConfig(1, 2, 96, block_size=block_size, vocab_size=256, pos="rope", bias=True, dropout=0.0)
        Recipe(model, KernelsConfig(), AttnConfig("sdpa"), OPTIM, "amp", seed=1).check_kernels(CPU)
        assert calls["norm"] == ({"shape": (1, length, 96), "residual_dtype": torch.float32}, torch.bfloat16)
        assert calls.keys() == set(OPS) - {"rms_norm", "glu"}


@pytest.mark.parametrize("statuses", [["wrong: out0"], ["wrong: out0", "ok: torch"], ["ok: torch", "wrong: out0"]])
def test_a_wrong_answer_is_an_error_each_time(answers, statuses):
    answers.statuses = statuses
    for _ in range(2):
        with pytest.raises(WrongKernel) as error:
            check_new_backends(KernelsConfig(), *CHOICE, calls=CALLS if len(statuses) == 2 else None)
        assert str(error.value) == (
            f"kernels/norm/eager.py breaks the contract {CONTRACT} (wrong: out0): "
            "python -m scripts.doctor op=norm impl=eager tells more, and kernels.check=false runs it"
        )


@pytest.mark.parametrize(
    ("statuses", "calls"),
    [
        (["undecided: no answer within 120 s"], None),
        (["undecided: no answer within 120 s", "ok: torch"], CALLS),
        (["ok: torch", "unavailable: no width of 96"], CALLS),
    ],
)
def test_a_check_without_an_answer_does_not_call_the_kernel_wrong(answers, statuses, calls):
    """A backend that refuses the call of this model cannot be checked for it."""
    answers.statuses = statuses
    status = next(status for status in statuses if not status.startswith("ok"))
    with pytest.raises(KernelError, match=rf"^kernels/norm/eager.py could not be checked \({status}\): ") as error:
        check_new_backends(KernelsConfig(), *CHOICE, calls=calls)
    assert not isinstance(error.value, WrongKernel)


def test_a_backend_that_refuses_the_first_case_has_this_status_without_a_model(answers):
    answers.statuses = ["unavailable: it needs a GPU"]
    assert check_new_backends(KernelsConfig(), *CHOICE) == {"norm": "unavailable: it needs a GPU"}


@pytest.mark.parametrize(
    ("op", "impl", "ops"), [("decode", "triton", GENERATION_OPS), ("adamw", "eager", TRAINING_OPS)]
)
def test_a_new_decoder_is_checked_for_generation_and_a_new_optimizer_for_training(answers, monkeypatch, op, impl, ops):
    """Evaluation calls neither."""
    answers.statuses = ["wrong: out0"]
    monkeypatch.setattr(new_backends, "tracked_backends", lambda name: ["blocks"] if name == op else impls(name))
    choice = KernelsConfig(**{op: impl}), *CHOICE
    assert check_new_backends(*choice) == check_new_backends(*choice, {*TRAINING_OPS, *GENERATION_OPS} - {op}) == {}
    assert answers.groups == []
    with pytest.raises(WrongKernel, match=rf"^kernels/{op}/{impl}.py breaks the contract {op}\("):
        check_new_backends(*choice, ops)
    assert [[(probe.op, probe.impl) for probe in group] for group in answers.groups] == [[(op, impl)]]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_broken_kernels_are_named_in_one_line(checkout):
    for name, text in FILES.items():
        (checkout / f"kernels/norm/{name}.py").write_text(text)
    program = f"""
import torch
from kernels.registry import AttnConfig, KernelsConfig
from lab.bench.new_backends import WrongKernel, check_new_backends

if __name__ == "__main__":
    for name in {list(FILES)}:
        try:
            print(name, check_new_backends(KernelsConfig(norm=name), AttnConfig("sdpa"), torch.device("cpu")))
        except WrongKernel as error:
            print(name, error)
"""
    (checkout / "program.py").write_text(program)
    done = subprocess.run([sys.executable, "program.py"], cwd=checkout, capture_output=True, text=True, check=True)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines.keys() == FILES.keys()
    assert lines.pop("good").startswith("{'norm': 'ok: ")
    for name, line in lines.items():
        assert line.startswith(f"kernels/norm/{name}.py breaks the contract {CONTRACT} {ERRORS[name]}")
