"""Measure the time and the peak memory of each attention backend, forward and backward, at one length T."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from kernels.attention.auto import attention_kind, entry_name
from kernels.check import rounding_error
from kernels.compat import FakeTensorMode
from kernels.fastest import record_fastest
from kernels.registry import KernelError, contract, describe, load, missing_argument
from kernels.speeds import store_speeds
from lab.bench.op import (
    DTYPES,
    ERROR_QUERIES,
    backend_of,
    errors,
    forward_and_backward,
    is_counted,
    optional_arguments,
    outputs,
    status_of,
)
from runtime.config import check
from runtime.device import GIB, OutOfMemory, explain_out_of_memory, reset_peak_memory
from runtime.meter import quantiles
from runtime.timing import synchronize, time_in_turns

TOKENS = 32768  # tokens of a call, if the batch is not given
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
LONGEST = {"cuda": 65536, "cpu": 2048}


class WrongAnswer(KernelError):
    """A contestant's outputs or gradients are wrong, so its speed is not shown."""

    status = "wrong"


@dataclass
class AttentionShape:
    """The shape of an attention without T. Every row has these fields."""

    batch: int | None  # null: as many sequences as have TOKENS tokens together, at least 1
    heads: int
    kv_heads: int | None
    head_dim: int
    window: int | None
    documents: int | None  # tokens of a document; a sequence consists of documents, and the last may be shorter
    dtype: str

    def __post_init__(self):
        check(self.dtype in DTYPES, f"dtype={self.dtype}: choose {', '.join(DTYPES)}")
        for key in ("heads", "head_dim"):
            check(getattr(self, key) >= 1, f"{key}={getattr(self, key)}: it must be at least 1")
        for key in ("batch", "window", "documents"):
            value = getattr(self, key)
            check(value is None or value >= 1, f"{key}={value}: it must be at least 1, or null")
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        check(
            kv_heads >= 1 and self.heads % kv_heads == 0,
            f"kv_heads={self.kv_heads}: heads={self.heads} must be a multiple of it",
        )

    def sequences(self, length: int) -> int:
        return self.batch or max(1, TOKENS // length)

    def arguments_at(self, length: int) -> dict:
        """Return the keyword arguments of the contract's inputs() at T = `length`."""
        size = self.sequences(length), length, self.heads, self.head_dim
        shape = {"shape": size, "kv_heads": self.kv_heads, "window": self.window}
        if self.documents:
            full, rest = divmod(length, self.documents)
            shape["documents"] = [self.documents] * full
            if rest:
                shape["documents"].append(rest)
        return shape


def default_lengths(device: torch.device) -> list[int]:
    return [length for length in LENGTHS if length <= LONGEST[device.type]]


def peak_gib(work: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak GiB that work() allocates on top of the memory in use; None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    synchronize(device)
    reset_peak_memory(device)
    before = torch.cuda.memory_allocated(device)
    work()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / GIB


def describe_excess(
    contestant_errors: dict[str, float], shape: AttentionShape, length: int, device: torch.device
) -> str | None:
    """Return which error of a contestant is too large; None if none is.

    The rule of kernels/check.py: an error is at most twice eager's over the same number of keys, plus a rounding.
    """
    dtype = DTYPES[shape.dtype]
    size = 1, min(ERROR_QUERIES, length), shape.heads, shape.head_dim
    small = {"shape": size, "keys": length, "kv_heads": shape.kv_heads, "window": shape.window}
    eager = errors(load("attention", "eager", device), contract("attention"), small, dtype, device)
    terms = max(length, shape.head_dim)  # of the longest sum; with T alone, 5 right fp32 answers in 100 failed at T = 1
    for key, error in contestant_errors.items():
        # with eps / 2 instead of rounding_error(), one right fp32 answer in 100 failed at T = 16
        if not error <= 2 * eager[key] + rounding_error(dtype, terms):
            return f"{key} is {error:.1e}, while eager's is {eager[key]:.1e}"
    return None


def prepare(
    name: str, function: Callable, row: dict, shape: AttentionShape, length: int, device: torch.device
) -> dict[str, Callable]:
    """Return the functions to time: `forward`, `both` ways, and `decode`, a decoding step, if the backend has one.

    Puts the contestant's errors and peak memory into `row`. Raises Unavailable, WrongAnswer or OutOfMemory.
    """
    module, dtype, arguments = contract("attention"), DTYPES[shape.dtype], shape.arguments_at(length)
    inputs = module.inputs(**arguments, dtype=dtype, device=device)
    dout = torch.randn_like(inputs["q"])
    attention = load("attention", backend_of(name), device, optional_arguments("attention", inputs))
    row["executed"] = describe("attention", backend_of(name), **arguments, dtype=dtype, device=device)
    contestant_errors = errors(function, module, arguments, dtype, device)
    row |= contestant_errors
    if reason := describe_excess(contestant_errors, shape, length, device):
        raise WrongAnswer(reason)
    works = {
        "forward": lambda: outputs(function, inputs),
        "both": lambda: forward_and_backward(function, inputs, [dout]),
    }
    peaks = {f"{way}/peak_gib": peak_gib(work, device) for way, work in works.items()}
    row |= peaks if is_counted("attention", backend_of(name)) else dict.fromkeys(peaks)
    if not shape.documents and not missing_argument(attention, "lengths"):
        sequences = shape.sequences(length)
        step = module.inputs(
            (sequences, 1, shape.heads, shape.head_dim),
            keys=length,
            lengths=[length] * sequences,
            kv_heads=shape.kv_heads,
            window=shape.window,
            dtype=dtype,
            device=device,
        )
        works["decode"] = torch.no_grad()(lambda: function(**step))
    return works


def measure(
    shape: AttentionShape, length: int, functions: dict[str, Callable], rounds: int, device: torch.device
) -> list[dict]:
    """Return a row for each contestant at one T. The contestants that are right and fit into the memory take turns."""
    rows, works = {}, {}
    for name, function in functions.items():
        rows[name] = row = {"impl": name, "T": length, **asdict(shape), "sequences": shape.sequences(length)}
        row["status"] = "ok"
        try:
            with explain_out_of_memory(f"attention={name} T={length}", "lengths"):
                prepared = prepare(name, function, row, shape, length, device)
        except OutOfMemory as full:
            row["status"] = full.status
        except Exception as error:  # a library's kernel may raise anything; the others go on
            row["status"] = status_of(error)
        else:
            works |= {f"{name} {way}": work for way, work in prepared.items()}
    cost = contract("attention").cost(**shape.arguments_at(length), dtype=DTYPES[shape.dtype])
    flops = {"forward": cost["forward"][0], "both": cost["forward"][0] + cost["backward"][0]}
    for work, seconds in time_in_turns(works, device, rounds).items():
        name, way = work.split()
        p20, median, p80 = quantiles(seconds)
        rows[name] |= {f"{way}/ms": 1e3 * median, f"{way}/ms/p20": 1e3 * p20, f"{way}/ms/p80": 1e3 * p80}
        if way in flops:
            rows[name][f"{way}/tflops"] = flops[way] / median / 1e12
    return list(rows.values())


def record_fastest_at_length(rows: list[dict], shape: AttentionShape, device: torch.device) -> Iterator[str]:
    """Write the fastest backend at one T into this user's table of attn=auto. Yield a line for each entry.

    The times of all backends go into the table of kernels/speeds.py.
    """
    with FakeTensorMode():
        inputs = contract("attention").inputs(**shape.arguments_at(rows[0]["T"]), dtype=DTYPES[shape.dtype])
    store_speeds("attention", inputs, rows, device)
    for decoding, key in ((None, "both/ms"), (True, "decode/ms")):
        group = shape.heads // (shape.kv_heads or shape.heads)
        kind = attention_kind(decoding, shape.window, shape.documents)
        name = entry_name(kind, DTYPES[shape.dtype], shape.head_dim, group)
        ms = {row["impl"]: row[key] for row in rows if key in row}
        if ms:
            yield record_fastest(name, rows[0]["T"], min(ms, key=ms.get), ms, device)
