"""model/memory.py against PyTorch's own books, of the same work on real tensors: autograd's and the allocator's."""

import gc
import json

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.registry import unavailable
from model.gpt import PRECISIONS
from model.memory import simulated
from runtime.config import parse
from runtime.device import GIB
from scripts import attempt
from scripts.max_context import ROOT
from train import train_step

CPU = torch.device("cpu")
TRITON = "kernels=triton", "model.n_layer=1"  # its interpreter is slow
LEAN = "kernels.norm=triton_recompute", "kernels.mlp=triton_recompute", "kernels.loss=triton_whole"


def config(*overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        words = "model=tiny", "model.n_layer=2", "device=cpu", "mode=train", "memory_gib=1", *overrides
        return parse(compose("max_context", overrides=list(words)), attempt.Config)


def here(overrides):
    """Or skip: where a GPU is, Triton's interpreter is off."""
    if "kernels=triton" in overrides and (why := unavailable("norm", "triton", CPU)):
        pytest.skip(why)


def predicted(cfg, length):
    """Bytes."""
    found = attempt.predict(cfg, length, CPU)
    assert found.pop("opaque") == []
    return {name.removesuffix("_gib"): gib * GIB for name, gib in found.items()}


class Tidy(TorchDispatchMode):
    """Triton's interpreter leaves its arguments' memory in reference cycles: collects them after each of our ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "hotswap":
            gc.collect()
        return out


def allocated(work, trace):
    """Bytes that PyTorch's allocator held at most while `work` ran, by its profiler."""
    gc.collect()
    gc.freeze()  # a collection then takes no time
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told, Tidy():
        work()
    gc.unfreeze()
    told.export_chrome_trace(str(trace))
    now = peak = 0
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["name"] == "[memory]":
            now += event["args"]["Bytes"]
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("attn=eager", "model.pos=rope"),
        ("model.checkpointing=block", "model.n_layer=4", "model.n_kv_head=1"),
        ("model.window=100", "model.bias=false"),
        TRITON,
        (*TRITON, *LEAN, "model.checkpointing=block", "attn=eager"),
    ],
    ids=" ".join,
)
def test_the_peak_of_a_step_to_the_byte(overrides, tmp_path):
    """Forward, backward, clip, AdamW and what custom ops take inside: as the allocator counts it."""
    here(overrides)
    cfg, length = config("precision=fp32", *overrides), 256

    def work():
        model, optimizer, batch = attempt.trainer(cfg, length, CPU)
        optimizer.state()
        train_step(model, optimizer, [batch], 1e-3)

    work()  # what is allocated once
    scalars = 64 + 5056 * (cfg.model.checkpointing == "block")  # and the random state, which a checkpoint keeps
    assert 0 <= allocated(work, tmp_path / "trace.json") - predicted(cfg, length)["peak"] <= scalars


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize(
    "overrides",
    [
        *[(f"precision={precision}", "attn=sdpa") for precision in PRECISIONS],
        *[(f"precision={precision}", "attn=eager", "model.pos=rope") for precision in PRECISIONS],
        ("precision=fp32", "kernels=triton"),  # in other dtypes its interpreter is wrong
    ],
    ids=" ".join,
)
def test_activations_are_what_autograd_keeps(overrides, checkpointing):
    here(overrides)
    cfg = config(f"model.checkpointing={checkpointing}", *overrides)
    model, _, batch = attempt.trainer(cfg, 72, CPU)
    mine = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *batch)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch)
    kept = {address: size for address, size in kept.items() if address not in mine}
    again = checkpointing == "block" and cfg.model.pos == "rope"
    table = 4 * 72 * cfg.model.n_embd // cfg.model.n_head * again  # which no block saves, and all will read
    assert predicted(cfg, 72)["activations"] == sum(kept.values()) + table + 2 * loss.nbytes  # and train_step's sum


@pytest.mark.parametrize(("precision", "stored", "state"), [("fp32", 4, 8), ("amp", 4, 8), ("bf16", 2, 12)])
def test_weights_and_optimizer_state(precision, stored, state):
    """Bytes a parameter; the optimizer's are moments, and masters of bf16 weights, besides some scalars."""
    cfg = config(f"precision={precision}")
    model, _, _ = attempt.trainer(cfg, 128, CPU)
    count, tensors = sum(w.numel() for w in model.parameters()), len(list(model.parameters()))
    found = predicted(cfg, 128)
    assert (found["weights"], found["gradients"]) == (stored * count, 4 * count)
    assert 0 < found["optimizer"] - state * count <= 4 * tensors + 16


def test_scores_are_quadratic_and_checkpoints_few():
    def third(*overrides):
        """Bytes a token, of the part in T and of the one in T^2."""
        a, b, c = (predicted(config(*overrides), length)["activations"] for length in (1024, 2048, 3072))
        quadratic = (c - 2 * b + a) / 2 / 1024**2
        return (b - a) / 1024 - quadratic * 3 * 1024, quadratic

    linear, quadratic = third("attn=sdpa", "precision=amp")
    assert abs(quadratic) < 1e-6
    assert third("attn=eager", "precision=amp")[1] > 2 * 2 * 4  # layers, bytes and heads of the probabilities alone
    assert third("precision=amp", "model.checkpointing=block")[0] < linear / 2


@pytest.mark.parametrize(("precision", "stream"), [("fp32", 4), ("amp", 4), ("bf16", 2)])
def test_a_checkpoint_is_the_stream_alone(precision, stream):
    """A block more is one tensor more, of 128 channels, and the random state that it began with."""
    found = [
        predicted(config(f"precision={precision}", "model.checkpointing=block", f"model.n_layer={layers}"), 1024)
        for layers in (3, 4)
    ]
    assert found[1]["activations"] - found[0]["activations"] - 1024 * 128 * stream in (0, 5056)


def test_generation_is_weights_cache_and_a_prefill():
    cfg = config("mode=generate", "precision=bf16")
    found = predicted(cfg, 1000)
    rows = 1088  # 1000 + 64, up to a multiple of 64
    assert found["kv_cache"] == 2 * 2 * rows * 128 * 2
    assert found["weights"] + found["kv_cache"] < found["peak"] < found["weights"] + found["kv_cache"] + 1000 * 128 * 40


def test_an_op_whose_inside_is_not_seen_is_named():
    @torch.library.custom_op("hotswap_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    double.register_fake(torch.empty_like)
    with simulated(CPU) as held:
        x = torch.zeros(1000)
        y = double(x)
        assert (held.now, held.peak, held.opaque) == (8000, 8000, {"hotswap_test::double"})
        del x, y
        assert (held.now, held.peak) == (0, 8000)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["kernels=eager", "kernels=triton", "kernels=triton model.checkpointing=host"])
def test_the_peak_on_a_gpu(choice):
    """Besides cuBLAS's and cuDNN's workspaces: 10% of 3 GiB."""
    size = "model=gpt2_124m", "model.n_layer=12", "precision=bf16", "memory_gib=null"
    cfg, device = config(*size, *choice.split(), "device=cuda"), torch.device("cuda")
    predicted = attempt.predict(cfg, 8192, device)["peak_gib"]
    assert predicted == pytest.approx(attempt.run(cfg, 8192, device)["peak_gib"], rel=0.1)
