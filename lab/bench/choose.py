"""Choose each op's fastest backend with correct results: kernels=auto attn=auto, decode=auto (kernels/fastest.py)."""

import inspect
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from common.terminal import class_and_message
from kernels import decode
from kernels.fastest import entry_name, record_fastest
from kernels.registry import AttnConfig, KernelsConfig, Unavailable, backend, contract, impls, load
from kernels.sampling import Sampling
from lab.bench import attention
from lab.bench.op import DTYPES, available_backends
from lab.bench.probe import ERRORS, Probe, first_word, run_probes
from lab.bench.speed import Call, store, time_backends
from lab.proof import Wrong
from lab.proof.generation import prove, why_proof_fails
from model.config import GPTConfig
from model.decoder import Decoder
from model.generate import stream
from model.generate_config import GenerateConfig
from model.gpt import GPT
from model.step import build
from runtime.device import reset_peak_memory

CPU_ROWS = 64  # with all rows it takes minutes
LIMIT = 120.0  # seconds of one probe
HEADS, HEAD_DIM = 12, 64  # GPT-2 124M's; scripts.bench_attention auto=true takes others
BATCHES = 1, 8, 64, 256  # sequences of a decoder
PROMPT, NEW_TOKENS = 128, 65  # tokens of each sequence; the prefill makes the first new one
PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}  # the compute dtype of a model -> its precision


def fill_op(op: str, shapes: list[str], dtype_name: str, rounds: int, device: torch.device) -> Iterator[str]:
    """Store the fastest backend of an op other than attention at each shape. Yield lines about the choices.

    A backend must be right in a probe, which has the same widths and fewer rows.
    """
    module = contract(op)
    names = [impl for impl in impls(op) if impl != "auto"]
    for shape_name in shapes:
        arguments = (module.SHAPES | module.CASES)[shape_name]
        *leading, width = arguments["shape"]
        count = CPU_ROWS if device.type == "cpu" else math.prod(leading)
        call = Call(op, arguments | {"shape": (count, width)}, DTYPES[dtype_name], trains=True)
        call, rows = time_backends(call, names, rounds, device, LIMIT)
        for row in rows:
            if first_word(row["status"]) in (*ERRORS, "oom"):
                yield f"without  {op}={row['impl']} at {shape_name}: {row['status']}"
        rows = [row for row in rows if "both/ms" in row]
        if not rows:
            yield f"without  {op} at {shape_name}: no backend gives correct results"
            continue
        store(call, rows, device)
        entry = entry_name(op, call.fake_inputs(device).values(), arguments.get("fp8", False))
        yield record_fastest(entry, width, *choose_fastest(rows), device)


def choose_fastest(rows: list[dict]) -> tuple[str, dict[str, float]]:
    """Return the fastest backend and {backend: ms}. Eager stays unless the fastest median is below eager's p20."""
    ms = {row["impl"]: row["both/ms"] for row in rows}
    best = min(ms, key=ms.get)
    eager_p20 = next((row["both/ms/p20"] for row in rows if row["impl"] == "eager"), math.inf)
    return best if ms[best] < eager_p20 else "eager", ms


def fill_attention(dtype_name: str, rounds: int, device: torch.device) -> Iterator[str]:
    """Store the fastest backend of attention at each T, also for a decoding step. Yield lines about the choices."""
    batch = None if device.type == "cuda" else 1
    shape = attention.AttentionShape(batch, HEADS, None, HEAD_DIM, None, None, dtype_name)
    names = [impl for impl in available_backends("attention", device) if impl != "auto"]
    functions = {impl: load("attention", impl, device) for impl in names}
    for length in attention.default_lengths(device):
        torch.compiler.reset()  # flex compiles each T anew, as in scripts.bench_attention
        rows = attention.measure(shape, length, functions, rounds, device)
        yield from attention.record_fastest_at_length(rows, shape, device)


def fill_decode(shapes: list[str], dtype_name: str, rounds: int, device: torch.device) -> Iterator[str]:
    """Store the fastest decoder at each number of sequences, for models of these shapes. Yield lines about the choices.

    Decoders that round the weights have other logits, and huggingface is another library's GPT-2: neither competes. A
    decoder must be right in a probe, which has one layer, and its text must be that of full forwards.
    """
    if dtype_name not in PRECISIONS:
        yield f"without  decode in {dtype_name}: choose dtype={' or dtype='.join(PRECISIONS)}"
        return
    names = [impl for impl in available_backends("decode", device) if impl not in ("auto", "huggingface")]
    names = [impl for impl in names if not getattr(backend("decode", impl), "LOSSY", False)]
    for shape_name in shapes:
        sizes = (decode.SHAPES | decode.CASES)[shape_name]
        changes = [{"batch": batch, "lengths": [PROMPT], "rows": 2 * PROMPT, "n_layer": 1} for batch in BATCHES]
        probes = [[Probe("decode", impl, sizes | change, DTYPES[dtype_name]) for change in changes] for impl in names]
        statuses = dict(zip(names, run_probes(probes, device, LIMIT), strict=True))
        model = random_model(sizes, PRECISIONS[dtype_name], device)
        for number, batch in enumerate(BATCHES):
            idx = torch.randint(model.config.vocab_size, (batch, PROMPT), device=device)
            decoders, found = {}, {impl: statuses[impl][number] for impl in names}
            for impl in [impl for impl, status in found.items() if first_word(status) == "ok"]:
                try:
                    decoders[impl] = prove_decoder(model, impl, PRECISIONS[dtype_name], idx)
                except (Unavailable, Wrong) as reason:
                    found[impl] = f"{reason.status}: {reason}"
                except Exception as error:  # a decoder may raise any error at a size that its probe did not have
                    found[impl] = f"failed: {class_and_message(error)}"
                reset_peak_memory(device)  # frees what a failed decoder left
            for impl, status in found.items():
                if first_word(status) in ERRORS:
                    yield f"without  decode={impl} at {shape_name}, {batch} sequences: {status}"
            if not decoders:
                yield f"without  decode at {shape_name}, {batch} sequences: no decoder gives correct results"
                continue
            turns = [{impl: step_ms(decoder, idx) for impl, decoder in decoders.items()} for _ in range(rounds)]
            ms = {impl: statistics.median(turn[impl] for turn in turns) for impl in decoders}
            entry = f"decode {dtype_name} {model.config.n_embd}"
            yield record_fastest(entry, batch, min(ms, key=ms.get), ms, device)


def random_model(sizes: dict, precision: str, device: torch.device) -> GPT:
    """Return a model with these sizes, as in SHAPES of kernels/decode/, and random weights."""
    sizes = {name: each.default for name, each in inspect.signature(decode.inputs).parameters.items()} | sizes
    config = GPTConfig(
        n_head=sizes["heads"],
        n_embd=sizes["width"],
        n_kv_head=sizes["kv_heads"],
        vocab_size=sizes["vocab"],
        pos="rope" if sizes["rope"] else "learned",
        block_size=PROMPT + NEW_TOKENS,
        dropout=0.0,
        **{field.name: sizes[field.name] for field in fields(GPTConfig) if field.name in sizes},
    )
    return build(config, KernelsConfig(), AttnConfig("sdpa"), precision, device, seed=0).eval()


def prove_decoder(model: GPT, impl: str, precision: str, idx: Tensor) -> Decoder:
    """Return a decoder of the prompts idx (B, PROMPT), ready to be timed. Raises Wrong if its text is wrong."""
    options = {"decode": impl, "options": GenerateConfig()}
    decoder = Decoder(model, len(idx), PROMPT + NEW_TOKENS, Sampling(model.config.vocab_size, temperature=0), **options)
    proof = prove(decoder, options, precision, idx, torch.full((len(idx),), PROMPT, device=idx.device))
    if reason := why_proof_fails(proof):
        raise Wrong(reason)
    decoder.warm_up(PROMPT, NEW_TOKENS)
    step_ms(decoder, idx)  # captures the prefill
    return decoder


def step_ms(decoder: Decoder, idx: Tensor) -> float:
    """Generate as scripts.generate does. Return the milliseconds of a step, from the first new token to the last."""
    arrivals = [time.perf_counter() for _ in stream(decoder, idx, NEW_TOKENS)]
    return 1e3 * (arrivals[-1] - arrivals[0]) / (NEW_TOKENS - 1)
