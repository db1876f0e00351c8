import subprocess
import sys

import pytest
import torch

from kernels import registry
from kernels.registry import AttnConfig, KernelError, KernelsConfig, Unavailable, describe, impls, label, load, resolve

CPU = torch.device("cpu")

MINE = '''"""LayerNorm by hand."""
from kernels.norm import reference


def norm(x, residual, weight, bias, eps=1e-5):
    return reference(x, residual, weight, bias, eps)


def detail(**inputs):
    return "mine, 1.0"
'''


def run(checkout, *command):
    done = subprocess.run([sys.executable, *command], cwd=checkout, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_a_file_is_a_backend(checkout):
    """A new file in an op's folder: the command line, the listing and the generic tests have it, with no other edit."""
    (checkout / "kernels/norm/mine.py").write_text(MINE)
    (checkout / "kernels/attention/mine.py").write_text("from kernels.attention import reference as attention\n")

    code, out = run(checkout, "train.py", "--help")
    assert code == 0
    assert f"norm       {', '.join(sorted([*impls('norm'), 'mine']))}\n" in out
    assert f"attn: {', '.join(sorted([*impls('attention'), 'mine']))}\n" in out

    smoke = "+experiment=smoke", "train.max_steps=1", "train.eval_every=0", "train.sample_tokens=0", "model.n_layer=1"
    code, out = run(checkout, "train.py", *smoke, "kernels.norm=mine", "attn=mine", "out_dir=out/run")
    assert code == 0, out
    assert "norm mine (mine, 1.0) | attention mine" in out

    code, out = run(
        checkout, "-m", "pytest", "-o", "addopts=", "-vv", "tests/kernels/test_backends.py", "-k", "mine and 768"
    )
    assert code == 0, out
    assert "test_against_float64[cpu-norm-mine-768-torch.bfloat16] PASSED" in out


def test_unknown_and_incomplete_backends(monkeypatch, tmp_path):
    with pytest.raises(KernelError, match=r"norm=fast: no file kernels/norm/fast.py; there are eager"):
        load("norm", "fast", CPU)
    with pytest.raises(KernelError, match=r"kernels.mlp=sdpa: no file"):
        KernelsConfig(norm="eager", mlp="sdpa", loss="eager", compile=False)
    with pytest.raises(KernelError, match=r"attn.impl=../norm/eager: no file"):
        AttnConfig("../norm/eager")
    module = registry.backend("norm", "eager")
    monkeypatch.delattr(module, "norm")
    with pytest.raises(KernelError, match=r"kernels/norm/eager.py defines no function norm"):
        load("norm", "eager", CPU)


def test_unavailable_says_why(monkeypatch):
    module = registry.backend("norm", "eager")
    why = "it needs an NVIDIA GPU of compute capability 8.0 or newer"
    monkeypatch.setattr(module, "unavailable", lambda device: why if device.type == "cpu" else None, raising=False)
    with pytest.raises(Unavailable, match=f"norm=eager cannot run here: {why}"):
        load("norm", "eager", CPU)
    assert load("norm", "eager", torch.device("cuda")) is module.norm


def test_every_op_has_its_contract():
    for op in registry.OPS:
        module = registry.contract(op)
        assert "eager" in impls(op)
        assert not module.SHAPES.keys() & module.CASES.keys()  # a benchmark knows both by name
        for shape in module.SHAPES.values():
            assert set(module.cost(**shape)) == {"forward", "backward"}


def test_sdpa_names_what_pytorch_takes():
    """The name is the dispatcher's own choice, also where PyTorch is told to make another."""
    told = describe("attention", "sdpa", shape=(2, 64, 4, 32), packed=True, dtype=torch.bfloat16)
    assert told == f"sdpa (flash_for_cpu, torch {torch.__version__})"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        told = describe("attention", "sdpa", shape=(2, 64, 4, 32), dtype=torch.float32)
    assert told == f"sdpa (math, torch {torch.__version__})"


def test_labels():
    def choice(norm="eager", mlp="eager", loss="eager", compile=False):
        return label(KernelsConfig(norm, mlp, loss, compile), AttnConfig("sdpa"))

    assert choice() == "eager-sdpa"
    assert choice(compile=True) == "compile-sdpa"


def test_no_log_line_with_the_whole_graph():
    """What leads to a custom op is a text that doubles with every layer, and PyTorch 2.11 writes it for a log."""
    from torch._inductor.exc import MissingOperatorWithoutDecomp

    class Endless:
        def __str__(self):
            raise AssertionError("written")

    resolve(KernelsConfig("eager", "eager", "eager", compile=True), AttnConfig("eager"), torch.device("cpu"))
    assert "aten.add" in MissingOperatorWithoutDecomp.operator_str(torch.ops.aten.add.Tensor, [Endless()], {})
