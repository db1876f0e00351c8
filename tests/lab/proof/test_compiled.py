"""The simulation of torch.compile, compared with what autograd saves for real tensors, and with sums by hand."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lab.proof import memory
from lab.proof.memory import predict_step, simulate
from runtime.device import GIB
from tests.lab.proof.test_memory import CPU, config


def predict(B, T, *overrides):
    return predict_step(config("kernels.compile=true", *overrides).recipe, B, T, 1, CPU)


@pytest.mark.parametrize("overrides", [("precision=amp", "attn=sdpa"), ("precision=bf16", "attn=eager")], ids=" ".join)
def test_predicted_activations_are_what_a_compiled_model_saves(overrides):
    """The real model runs AOTAutograd's graphs operator by operator, with Inductor's decompositions."""
    B, T = 2, 72
    overrides = *overrides, "model.n_layer=1"
    cfg = config(*overrides)
    model = cfg.recipe.build(CPU)
    batch = torch.zeros(2, B, T, dtype=torch.int64).unbind()
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *batch)}
    saved = {}  # address -> bytes

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch)
    saved_bytes = sum(size for address, size in saved.items() if address not in inputs)
    saved_bytes += 2 * loss.nbytes  # the loss, and train_step's sum of losses
    uncompiled = predict_step(cfg.recipe, B, T, 1, CPU)["activations"]
    assert predict(B, T, *overrides)["activations"] * GIB == pytest.approx(saved_bytes, abs=256)
    assert saved_bytes < 0.97 * uncompiled * GIB


def test_fused_operators_allocate_only_the_result_of_their_kernel():
    """Without torch.compile 3 tensors of 4 MB exist besides the arguments: y, its tanh and their product.

    Compiled, one kernel computes the product and overwrites y, and 2 exist.
    """

    def function(x, weight):
        y = x @ weight
        return (torch.tanh(y) * y) @ weight

    peaks = []
    for compiled in (False, True):
        with simulate(CPU) as usage:
            x, weight = torch.zeros(2, 1000, 1000).unbind()
            before = usage.now
            result = (torch.compile(function, fullgraph=True) if compiled else function)(x, weight)
            assert usage.now - before == result.nbytes == 4_000_000
            peaks.append((usage.peak - before) / result.nbytes)
    assert peaks == [3, 2]


def test_a_result_does_not_overwrite_an_argument_of_another_size():
    """The kernel reads 4 MB and writes 8 MB."""
    with simulate(CPU) as usage:
        x = torch.zeros(1000, 1000)
        before = usage.now
        torch.compile(lambda x: (x @ x).double() + 1, fullgraph=True)(x)
        assert usage.peak - before == 12_000_000


@pytest.mark.exhaustive
def test_a_compiled_model_is_traced_with_few_layers(monkeypatch):
    few = predict(2, 72, "model.n_layer=4")
    monkeypatch.setattr(memory, "FEW_LAYERS", (3, 4))
    assert predict(2, 72, "model.n_layer=4") == pytest.approx(few, abs=1e-12)


def test_two_lengths_and_a_step_of_two_micro_batches_are_simulated_in_one_process():
    """Dynamo does not go on with symbolic sizes. The second micro-batch adds to fp32 gradients of bf16 weights."""
    recipe = config("kernels.compile=true", "precision=bf16", "model.n_layer=1").recipe
    short, long = (predict_step(recipe, 2, T, 1, CPU)["activations"] for T in (64, 128))
    assert long == pytest.approx(2 * short, rel=0.01)
    twice = predict_step(recipe, 2, 128, 2, CPU)
    assert twice["activations"] == pytest.approx(long, abs=64 / GIB)
    assert twice["gradients"] == 2 * twice["weights"]
