"""`python -m scripts.blame`: kernels that overflow on purpose, and steps that eager PyTorch cannot repair."""

from pathlib import Path

import pytest
import torch

from scripts import blame
from tests.test_train import QUICK

HEAD = """
import torch
from kernels.mlp import reference
calls = 0


"""
# The second of two layers overflows: its calls are even
FORWARD = """def mlp(x, w_fc, b_fc, w_proj, b_proj):
    global calls
    calls += 1
    y = reference(x, w_fc, b_fc, w_proj, b_proj)
    return y * 1e30 * 1e30 if calls % 2 == 0 else y
"""
BACKWARD = """class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx * 1e30 * 1e30


def mlp(x, w_fc, b_fc, w_proj, b_proj):
    return reference(Overflow.apply(x), w_fc, b_fc, w_proj, b_proj)
"""
RUN = *QUICK, "model.n_layer=2", "train.max_steps=3", "kernels.mlp=mine.py", "kernels.check=false"


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("blame.py", blame.main, *arguments, "--device", "cpu")


@pytest.mark.parametrize(
    ("body", "first"), [(FORWARD, "mlp in h.1.mlp, its output"), (BACKWARD, "mlp in h.1.mlp, its gradient")]
)
def test_the_kernel_that_overflows_is_named_with_its_layer(command, hotswap, body, first):
    """The backward comes to the last layer first."""
    Path("mine.py").write_text(HEAD + body)
    assert hotswap(*RUN)[0] == 1
    assert torch.load("run/nonfinite-step-000001.pt", weights_only=True).keys() == {"step", "batches", "weights"}
    code, out, err = command("run")
    assert (code, err) == (0, "")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if "|" in line]
    assert [line[0] for line in lines[2:]] == ["as in the run", "attn.impl=eager", "kernels.mlp=eager", "all ops eager"]
    assert [line[2] for line in lines[2:]] == [first, first, "every call is finite", "every call is finite"]
    assert f"The first is {first}. The step is finite with kernels.mlp=eager or with all ops eager.\n" in out
    assert out.endswith("The weights are those after step 0, the batches are of step 1.\n")


def test_weights_that_are_not_finite_are_not_a_kernels_fault(command, hotswap):
    Path("mine.py").write_text(HEAD + FORWARD)
    assert hotswap(*RUN)[0] == 1
    kept = torch.load("run/nonfinite-step-000001.pt", weights_only=True)
    kept["weights"]["h.0.attn.c_attn.bias"][0] = torch.inf
    torch.save(kept, "run/nonfinite-step-000001.pt")
    code, out, _ = command("run")
    assert code == 0
    assert "The first is the inputs of linear in h.0.attn.c_attn. Eager PyTorch goes wrong, too" in out


def test_a_step_that_is_finite_again_is_exit_code_1(command, hotswap):
    """Without weights in the file, a checkpoint of an earlier step takes their place."""
    Path("mine.py").write_text(HEAD + FORWARD.replace(" * 1e30 * 1e30", ""))
    assert hotswap(*RUN, "train.checkpoint_every=2")[0] == 0
    batch = torch.zeros(1, 8, dtype=torch.int64)
    torch.save({"step": 3, "batches": [(batch, batch)]}, "run/nonfinite-step-000003.pt")
    code, out, err = command("run")
    assert (code, err) == (1, "")
    assert "The step does not go wrong in this replay" in out
    assert "The weights are those after step 2, the batches are of step 3." in out
    assert command("run", "--step", "5") == (1, "", "error: --step 5: run has the steps 3\n")


def test_a_folder_without_a_kept_step_is_an_error(command, hotswap):
    assert command("run") == (1, "", "error: run is not the folder of a run: it has no config.yaml\n")
    assert hotswap(*QUICK, "train.max_steps=1")[0] == 0
    assert command("run")[2].startswith("error: run has no nonfinite-step-*.pt: ")
