"""Choose each op's fastest backend with correct results, for kernels=auto and attn=auto (kernels/fastest.py)."""

import math
from collections.abc import Iterator

import torch

from kernels.compat import FakeTensorMode
from kernels.fastest import entry_name, record_fastest
from kernels.registry import contract, impls, load
from kernels.speeds import store_speeds
from lab.bench import attention
from lab.bench.op import DTYPES, available_backends, measure
from lab.bench.probe import ERRORS, Probe, first_word, run_probes
from runtime.device import OutOfMemory, explain_out_of_memory

PROBE_ROWS = {"cuda": 256, "cpu": 64}  # on a CPU also of the timing: with all rows it takes minutes
LIMIT = 120.0  # seconds of one probe
HEADS, HEAD_DIM = 12, 64  # GPT-2 124M's; scripts.bench_attention auto=true takes others


def fill_op(op: str, shapes: list[str], dtype_name: str, rounds: int, device: torch.device) -> Iterator[str]:
    """Store the fastest backend of an op other than attention at each shape. Yield lines about the choices.

    A backend must be right in a probe, which has the same widths and fewer rows.
    """
    module, dtype = contract(op), DTYPES[dtype_name]
    names = [impl for impl in impls(op) if impl != "auto"]
    for shape_name in shapes:
        shape = (module.SHAPES | module.CASES)[shape_name]
        width = shape["shape"][-1]
        small = shape | {"shape": (PROBE_ROWS[device.type], width)}
        groups = [[Probe(op, impl, small, dtype)] for impl in names]
        statuses = {impl: status for impl, [status] in zip(names, run_probes(groups, device, LIMIT), strict=True)}
        right = [impl for impl, status in statuses.items() if first_word(status) == "ok"]
        for impl, status in statuses.items():
            if first_word(status) in ERRORS:
                yield f"without  {op}={impl} at {shape_name}: {status}"
        if not right:
            yield f"without  {op} at {shape_name}: no backend gives correct results"
            continue
        rows, timed = time_backends(
            op, shape_name, shape if device.type == "cuda" else small, right, dtype_name, rounds, device
        )
        with FakeTensorMode():
            inputs = module.inputs(**timed, dtype=dtype, device=device)
        store_speeds(op, inputs, rows, device)
        entry = entry_name(op, inputs.values(), shape.get("fp8", False))
        yield record_fastest(entry, width, *choose_fastest(rows), device)


def time_backends(
    op: str, shape_name: str, shape: dict, names: list[str], dtype_name: str, rounds: int, device: torch.device
) -> tuple[list[dict], dict]:
    """Return (the benchmark's rows, the shape that was timed).

    While a backend does not fit into the memory, halve the number of rows of x.
    """
    *_, width = shape["shape"]
    count = torch.Size(shape["shape"]).numel() // width
    while True:
        try:
            with explain_out_of_memory(f"op={op} shape={shape_name}", "the size: choose a smaller shape"):
                fewer = shape | {"shape": (count, width)}
                return measure(op, shape_name, fewer, names, dtype_name, rounds, device)[0], fewer
        except OutOfMemory:
            if count <= PROBE_ROWS[device.type]:
                raise
            count //= 2


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
