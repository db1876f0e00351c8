"""Predictions of lab/proof/memory.py, compared with what PyTorch's autograd and allocator report for real tensors."""

import gc
import importlib
import json
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from kernels.compat import TorchDispatchMode
from kernels.registry import backend, contract, unavailable
from lab.context import attempt
from lab.context.prober import ROOT
from lab.proof import memory
from lab.proof.memory import predict_step, simulate
from model import chunks, decoder
from model.config import PRECISIONS
from model.step import train_step
from model.vocabulary import take_vocabulary
from runtime.config import parse
from runtime.device import GIB
from runtime.ranks import Ranks
from scripts.max_context import Config

CPU = torch.device("cpu")
TRITON = "kernels=triton", "model.n_layer=1"  # its interpreter is slow
LEAN = "kernels.norm=triton_recompute", "kernels.mlp=triton_recompute", "kernels.loss=triton_whole"


def config(*overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        words = "model=tiny", "model.n_layer=2", "device=cpu", "mode=train", "memory_gib=1", *overrides
        cfg = compose("max_context", overrides=list(words))
    take_vocabulary(cfg, "tokenizer")
    return parse(cfg, Config)


def skip_if_unavailable(overrides):
    """Skip the test if it needs Triton's interpreter, which is off if there is a GPU."""
    if "kernels=triton" in overrides and (reason := unavailable("norm", "triton", CPU)):
        pytest.skip(reason)


def predict_bytes(cfg, length):
    """Return the predicted bytes of each part."""
    prediction = attempt.predict(cfg.recipe, cfg.mode, length, CPU)
    assert prediction.pop("opaque") == []
    return {name.removesuffix("_gib"): gib * GIB for name, gib in prediction.items()}


class CollectGarbage(TorchDispatchMode):
    """Frees the memory of arguments after each of our ops. Triton's interpreter keeps it in reference cycles."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "hotswap":
            gc.collect()
        return out


def allocated_peak(work, trace):
    """Return the peak bytes of PyTorch's allocator while `work` runs, by PyTorch's profiler."""
    gc.collect()
    gc.freeze()  # a collection then takes no time
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, CollectGarbage():
        work()
    profiler.export_chrome_trace(str(trace))
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
        ("model.checkpointing=chunks", "model.pos=rope"),
        ("model.window=100", "model.bias=false"),
        pytest.param(TRITON, marks=pytest.mark.exhaustive),
        pytest.param((*TRITON, *LEAN, "model.checkpointing=block", "attn=eager"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_predicted_peak_of_a_step_equals_the_peak_of_the_allocator(overrides, tmp_path, monkeypatch):
    """The prediction is right to the byte. It covers forward, backward, clip, AdamW, and memory inside custom ops."""
    skip_if_unavailable(overrides)
    cfg, length = config("precision=fp32", *overrides), 256
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100 * cfg.model.n_embd * 4)  # 100 tokens

    def work():
        model, optimizer, batches = attempt.build_trainer(cfg.recipe, length, CPU, Ranks())
        optimizer.state()
        train_step(model, optimizer, batches, 1e-3)

    work()  # the first call makes allocations that later calls do not repeat
    # The op mlp calls sum_rows(), which runs 8 programs. The interpreter keeps their sums until the op ends
    bias_sums = 4 * 8 * cfg.model.n_embd if cfg.kernels.mlp == "triton" else 0
    error = allocated_peak(work, tmp_path / "trace.json") - predict_bytes(cfg, length)["peak"]
    assert 0 <= error <= 64 + bias_sums  # 64 bytes of scalars


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize(
    "overrides",
    [
        *[(f"precision={precision}", "attn=sdpa") for precision in PRECISIONS],
        *[(f"precision={precision}", "attn=eager", "model.pos=rope") for precision in PRECISIONS],
        ("precision=fp32", "kernels=triton"),  # in other dtypes Triton's interpreter is wrong
    ],
    ids=" ".join,
)
def test_predicted_activations_are_the_tensors_that_autograd_saves(overrides, checkpointing):
    skip_if_unavailable(overrides)
    cfg = config(f"model.checkpointing={checkpointing}", *overrides)
    model, _, [batch] = attempt.build_trainer(cfg.recipe, 72, CPU, Ranks())
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *batch)}
    saved = {}  # address -> bytes

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch)
    saved_bytes = sum(size for address, size in saved.items() if address not in inputs)
    if checkpointing == "block" and cfg.model.pos == "rope":  # no block saves rope's table, and the backward reads it
        saved_bytes += 4 * 72 * cfg.model.n_embd // cfg.model.n_head
    saved_bytes += 2 * loss.nbytes  # the loss, and train_step's sum of losses
    assert predict_bytes(cfg, 72)["activations"] == saved_bytes


@pytest.mark.parametrize(("checkpointing", "outputs"), [("none", 2), ("block", 0)])
def test_two_ranks_save_the_activations_of_half_a_sequence(monkeypatch, checkpointing, outputs):
    """Without checkpoints, each layer also saves the output of attention as it is after the exchange."""
    cfg = config("precision=bf16", "attn=sdpa", f"model.checkpointing={checkpointing}")
    alone = predict_bytes(cfg, 128)["activations"]
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(key, value)
    more = predict_bytes(cfg, 256)["activations"] - alone
    assert more == pytest.approx(outputs * 128 * cfg.model.n_embd * 2, abs=64)  # bytes


def test_chunks_take_less_memory_a_token(monkeypatch):
    """The MLP's tensors, 8 bytes a token and channel for each of hidden units, GELU and two gradients, are gone.

    With attn=sdpa on a CPU it is 34 bytes instead of 45, because the backward of that attention works in fp32. With
    FlashAttention it is less.
    """
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**16)
    slopes = {}
    for checkpointing in ("host", "chunks"):
        cfg = config("precision=bf16", "attn=sdpa", "model.pos=rope", f"model.checkpointing={checkpointing}")
        short, long = (predict_bytes(cfg, length)["peak"] for length in (1536, 2048))  # 6 and 8 chunks
        slopes[checkpointing] = (long - short) / 512 / cfg.model.n_embd
    assert slopes["chunks"] < 0.8 * slopes["host"]


def test_many_chunks_take_as_much_as_the_simulation_of_all(monkeypatch):
    """The prediction simulates six and seven chunks in two layers and in three, and the line is right to the byte.

    There are two ranks. FEW_CHUNKS would take twice as long. A last chunk that is not full may take less at the peak,
    so there is none.
    """
    monkeypatch.setattr(memory, "FEW_CHUNKS", (6, 7))
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**16)
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg = config("precision=bf16", "attn=sdpa", "model.n_layer=4", "model.pos=rope", "model.checkpointing=chunks")
    length = 20 * 2**16 // (2 * cfg.model.n_embd)
    line = predict_bytes(cfg, length)
    monkeypatch.setattr(memory, "FEW_CHUNKS", (98, 99))
    assert line == pytest.approx(predict_bytes(cfg, length), rel=0, abs=1)


@pytest.mark.parametrize(("precision", "stored", "state"), [("fp32", 4, 8), ("amp", 4, 8), ("bf16", 2, 12)])
def test_predicted_weights_gradients_and_optimizer_state(precision, stored, state):
    """In bytes a parameter. The optimizer has the moments, the masters of bf16 weights, and some scalars."""
    cfg = config(f"precision={precision}")
    model, _, _ = attempt.build_trainer(cfg.recipe, 128, CPU, Ranks())
    count, tensors = sum(w.numel() for w in model.parameters()), len(list(model.parameters()))
    parts = predict_bytes(cfg, 128)
    assert (parts["weights"], parts["gradients"]) == (stored * count, 4 * count)
    assert 0 < parts["optimizer"] - state * count <= 4 * tensors + 36  # AdamW's steps, four counters, lr


def test_a_compiled_model_is_predicted_as_if_it_were_not_compiled():
    plain, compiled = (predict_bytes(config(f"kernels={name}"), 128) for name in ("eager", "compile"))
    assert plain == compiled


def test_the_gradients_of_a_micro_batch_are_there_in_the_next_forward():
    """The peak of one micro-batch is before the end of its backward, when most gradients are not there yet."""
    one, two = (predict_step(config().recipe, 1, 16, count, CPU) for count in (1, 2))
    assert 0.5 * one["gradients"] < two["peak"] - one["peak"] <= one["gradients"]


def test_predicted_activations_are_linear_in_T_except_for_scores():
    """Attention that writes scores adds a part in T^2. Checkpoints take less than half of the part in T."""

    def coefficients(*overrides):
        """Return the bytes of activations as (coefficient of T, coefficient of T^2)."""
        a, b, c = (predict_bytes(config(*overrides), length)["activations"] for length in (1024, 2048, 3072))
        quadratic = (c - 2 * b + a) / 2 / 1024**2
        return (b - a) / 1024 - quadratic * 3 * 1024, quadratic

    linear, quadratic = coefficients("attn=sdpa", "precision=amp")
    assert abs(quadratic) < 1e-6
    assert coefficients("attn=eager", "precision=amp")[1] > 2 * 2 * 4  # probabilities: layers, bytes and heads
    assert coefficients("precision=amp", "model.checkpointing=block")[0] < linear / 2


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("amp", 4), ("bf16", 2)])
def test_a_checkpoint_saves_one_tensor_a_block(precision, itemsize):
    """The tensor is the residual stream, of 128 channels. The random state before the block may come on top."""
    three_blocks, four_blocks = (
        predict_bytes(config(f"precision={precision}", "model.checkpointing=block", f"model.n_layer={layers}"), 1024)
        for layers in (3, 4)
    )
    assert four_blocks["activations"] - three_blocks["activations"] - 1024 * 128 * itemsize in (0, 5056)


def test_predicted_peak_of_generation_is_weights_cache_and_a_prefill():
    cfg = config("mode=generate", "precision=bf16")
    parts = predict_bytes(cfg, 1000)
    rows = 1088  # 1000 + 64, rounded up to a multiple of 64
    assert parts["kv_cache"] == 2 * 2 * rows * 128 * 2
    assert 0 < parts["peak"] - parts["weights"] - parts["kv_cache"] < 1000 * 128 * 40


def test_prediction_of_a_long_prompt_simulates_only_its_last_chunks(monkeypatch):
    """The peak is the same as with all 7 chunks. A longer prompt takes no more forwards."""
    monkeypatch.setattr(decoder, "CHUNK", 512)
    cfg = config("mode=generate", "precision=bf16")
    whole = predict_bytes(cfg, 6 * 512 + 100)
    monkeypatch.setattr(attempt, "CHUNK", 512)
    assert predict_bytes(cfg, 6 * 512 + 100) == whole
    calls = mock.Mock(wraps=decoder.Decoder._forward)
    monkeypatch.setattr(decoder.Decoder, "_forward", lambda *arguments: calls(*arguments))
    predict_bytes(cfg, 100_000)
    assert calls.call_count == 3 + 1 + 1  # whole chunks, the rest, and a step


def test_an_op_whose_allocations_are_not_seen_is_named():
    """What its fake allocates counts: the result, and here a workspace of 500 elements."""

    @torch.library.custom_op("hotswap_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    @double.register_fake
    def _(x):
        y = torch.empty_like(x)
        x.new_empty(500)
        return y

    with simulate(CPU) as usage:
        x = torch.zeros(1000)
        y = double(x)
        assert (usage.now, usage.peak, usage.opaque) == (8000, 10_000, {"hotswap_test::double"})
        del x, y
        assert (usage.now, usage.peak) == (0, 10_000)


@pytest.mark.parametrize(
    ("op", "impl"),
    [*((op, impl) for op in ("norm", "linear", "attention") for impl in ("cutile", "tilelang")), ("loss", "cutile")],
)
def test_another_languages_kernels_are_not_launched_on_fake_tensors(op, impl):
    """Their launchers would compile a kernel, and give it addresses that fake tensors do not have."""
    with simulate(CPU) as usage:
        shape = (2, 64, 3, 64) if op == "attention" else (64, 128)
        options = {"linear": {"out": 256}, "loss": {"vocab": 256}}.get(op, {})
        inputs = contract(op).inputs(shape, dtype=torch.bfloat16, **options)
        outputs = getattr(backend(op, impl), op)(**inputs)
        (outputs[0] if op == "norm" else outputs).sum().backward()
    names = ["linear_cross_entropy"] if op == "loss" else [f"{op}_fwd", f"{op}_bwd"]
    assert usage.opaque == {f"hotswap::{impl}_{name}" for name in names}


def test_an_op_that_compiles_itself_counts_as_without_torch_compile():
    with simulate(CPU) as usage:
        x = torch.zeros(1000)
        torch.compile(lambda x: x.exp() + x, fullgraph=True)(x)
        assert (usage.now, usage.peak) == (4000, 12_000)


def test_the_workspace_of_flash_attentions_backward_counts():
    """It has a sum of dq in fp32 and two numbers for each query, and with grouped heads sums of dk and dv."""
    flash = importlib.import_module("kernels.attention.flash")
    B, T, H, D = 2, 100, 4, 64
    for Hkv in (4, 2):
        with simulate(CPU) as usage:
            q, dout, out = (torch.empty(B, T, H, D, dtype=torch.bfloat16) for _ in range(3))
            k, v = (torch.empty(B, T, Hkv, D, dtype=torch.bfloat16) for _ in range(2))
            before = usage.now
            flash.flash_bwd(dout, q, k, v, out, q.new_empty(B, H, T), True, 1.0, None, None, None, None)
        gradients = B * T * (H + 2 * Hkv) * D * 2
        workspace = B * T * H * (D + 2) * 4 + (B * T * 2 * Hkv * D * 4 if Hkv < H else 0)
        lse = B * H * T * 2
        assert usage.peak - before - lse == gradients + workspace


def test_the_workspace_of_cudnns_backward_counts():
    """It has a sum of dq in fp32 and a number for each query, and with grouped heads dk and dv of each query head.

    cuDNN 9.19 asks for these bytes, and at most 256 more, for an H200.
    """
    frontend = importlib.import_module("kernels.attention.cudnn_frontend")
    B, T, H, D = 2, 128, 4, 64
    for Hkv in (4, 2):
        with simulate(CPU) as usage:
            q, dout, out = (torch.empty(B, T, H, D, dtype=torch.bfloat16) for _ in range(3))
            k, v = (torch.empty(B, T, Hkv, D, dtype=torch.bfloat16) for _ in range(2))
            lse, before = torch.empty(B, H, T), usage.now
            frontend.attention_bwd(dout, q, k, v, out, lse, True, 1.0, None)
        gradients = B * T * (H + 2 * Hkv) * D * 2
        workspace = B * T * H * (D + 1) * 4 + (2 * B * T * H * D * 2 if Hkv < H else 0)
        assert usage.peak - before == gradients + workspace


@pytest.mark.gpu
@pytest.mark.parametrize(
    "choice",
    [
        "kernels=eager",
        "kernels=triton",
        "kernels=triton model.checkpointing=host",
        "kernels=triton attn=flex",
    ],
)
def test_predicted_peak_on_a_gpu(choice):
    """The prediction is within 10% of 3 GiB. It does not count the workspaces of cuBLAS and cuDNN."""
    size = "model=gpt2_124m", "model.n_layer=12", "precision=bf16", "memory_gib=null"
    cfg, device = config(*size, *choice.split(), "device=cuda"), torch.device("cuda")
    predicted = attempt.predict(cfg.recipe, cfg.mode, 8192, device)["peak_gib"]
    measured = attempt.run_attempt(cfg.recipe, cfg.mode, 8192, None, device)["peak_gib"]
    assert predicted == pytest.approx(measured, rel=0.1)
