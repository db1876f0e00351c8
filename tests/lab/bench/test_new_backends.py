"""The check of a backend that is not part of the repo."""

import subprocess
import sys

import pytest
import torch

from kernels.names import GENERATION_OPS, TRAINING_OPS
from kernels.registry import AttnConfig, KernelError, KernelsConfig, impls
from lab.bench import new_backends
from lab.bench.new_backends import WrongKernel, check_new_backends

CPU = torch.device("cpu")
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


def test_a_shipped_backend_is_not_checked_and_another_one_once(monkeypatch, tmp_path):
    probed = []

    def answer(groups, device, limit):
        for [probe] in groups:
            probed.append((probe.op, probe.impl))
            yield ["ok: torch"]

    monkeypatch.setattr(new_backends, "run_probes", answer)
    monkeypatch.setattr(new_backends, "CACHE", tmp_path)
    choice = KernelsConfig(mlp="triton_recompute"), AttnConfig("sdpa"), CPU
    assert check_new_backends(*choice) == {}
    monkeypatch.setattr(new_backends, "tracked_backends", lambda op: {"auto", "eager", "triton", "sdpa"})
    assert check_new_backends(KernelsConfig(mlp="triton_recompute", check=False), *choice[1:]) == {}
    assert check_new_backends(*choice) == check_new_backends(*choice) == {"mlp": "ok: torch"}
    assert probed == [("mlp", "triton_recompute")]
    monkeypatch.setattr(torch, "__version__", "another")
    check_new_backends(*choice)
    assert len(probed) == 2


def test_a_wrong_answer_is_an_error_each_time(monkeypatch, tmp_path):
    monkeypatch.setattr(new_backends, "run_probes", lambda groups, device, limit: [["wrong: out0"] for _ in groups])
    monkeypatch.setattr(new_backends, "CACHE", tmp_path)
    monkeypatch.setattr(new_backends, "tracked_backends", lambda op: [] if op == "norm" else impls(op))
    for _ in range(2):
        with pytest.raises(WrongKernel) as error:
            check_new_backends(KernelsConfig(), AttnConfig("sdpa"), CPU)
        assert str(error.value) == (
            f"kernels/norm/eager.py breaks the contract {CONTRACT} (wrong: out0): "
            "python -m scripts.doctor op=norm impl=eager tells more, and kernels.check=false runs it"
        )


def test_a_check_without_an_answer_does_not_call_the_kernel_wrong(monkeypatch, tmp_path):
    late = "undecided: no answer within 120 s"
    monkeypatch.setattr(new_backends, "run_probes", lambda groups, device, limit: [[late] for _ in groups])
    monkeypatch.setattr(new_backends, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(new_backends, "tracked_backends", lambda op: [] if op == "norm" else impls(op))
    with pytest.raises(KernelError, match=rf"^kernels/norm/eager.py could not be checked \({late}\): ") as error:
        check_new_backends(KernelsConfig(), AttnConfig("sdpa"), CPU)
    assert not isinstance(error.value, WrongKernel)
    assert not (tmp_path / "cache").exists()  # the next run checks again


@pytest.mark.parametrize(
    ("op", "impl", "ops"), [("decode", "triton", GENERATION_OPS), ("adamw", "eager", TRAINING_OPS)]
)
def test_a_new_decoder_is_checked_for_generation_and_a_new_optimizer_for_training(monkeypatch, tmp_path, op, impl, ops):
    """Evaluation calls neither."""
    probed = []

    def answer(groups, device, limit):
        probed.extend((probe.op, probe.impl) for [probe] in groups)
        return [["wrong: out0"] for _ in groups]

    monkeypatch.setattr(new_backends, "run_probes", answer)
    monkeypatch.setattr(new_backends, "CACHE", tmp_path)
    monkeypatch.setattr(new_backends, "tracked_backends", lambda name: ["blocks"] if name == op else impls(name))
    choice = KernelsConfig(**{op: impl}), AttnConfig("sdpa"), CPU
    assert check_new_backends(*choice) == check_new_backends(*choice, {*TRAINING_OPS, *GENERATION_OPS} - {op}) == {}
    assert probed == []
    with pytest.raises(WrongKernel, match=rf"^kernels/{op}/{impl}.py breaks the contract {op}\("):
        check_new_backends(*choice, ops)
    assert probed == [(op, impl)]


@pytest.mark.parametrize("name", ["_gelu.py", "matmul.py", "ring.py"])  # the others are parts of several ops
def test_a_kept_answer_counts_for_the_same_code_only(monkeypatch, name):
    key, read = new_backends.cache_key("mlp", "eager", CPU), new_backends.read_bytes
    assert key == new_backends.cache_key("mlp", "eager", CPU)
    monkeypatch.setattr(new_backends, "read_bytes", lambda path: read(path) + b"#" * (path.name == name))
    assert new_backends.cache_key("mlp", "eager", CPU) != key


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
