"""Choose each op's fastest backend with correct results, for kernels=auto and attn=auto (kernels/fastest.py)."""

import math
from collections.abc import Iterator

import torch

from kernels.fastest import entry_name, record_fastest
from kernels.registry import contract, impls, load
from lab.bench import attention
from lab.bench.op import DTYPES, available_backends
from lab.bench.probe import ERRORS, first_word
from lab.bench.speed import Call, store, time_backends

CPU_ROWS = 64  # with all rows it takes minutes
LIMIT = 120.0  # seconds of one probe
HEADS, HEAD_DIM = 12, 64  # GPT-2 124M's; scripts.bench_attention auto=true takes others


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
