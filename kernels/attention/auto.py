"""Call the backend that was measured to be the fastest for such inputs on this GPU.

`python -m scripts.bench_attention auto=true` times every backend that runs here, forward and backward. For each T it
stores the fastest backend with a correct result in the tables of kernels/tuned.py. A table has one entry for each kind
of attention (causal, window, documents, window and documents; each also as a decoding step), dtype, head dim and number
of query heads per key head. A call looks up its entry and takes the backend of the measured T that is nearest to its
number of keys by ratio. Training does not time any backend. A run prints and records the backend that it uses.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from kernels.registry import Unavailable, backend, impls
from kernels.tuned import merged_table

deterministic = False  # the backend that it calls may be nondeterministic
FAMILY = "^_(fwd|dq|dkdv|combine|lse_delta)_k|probabilities"  # the kernels of triton.py and triton_naive.py
FILL_COMMAND = "python -m scripts.bench_attention auto=true"
# {device type: {entry name: its length_ranges()}}. unavailable() fills it before any call of attention(), because
# torch.compile cannot trace code that reads a file
_choices: dict[str, dict[str, list]] = {}


def entry_name(kind: str, dtype: torch.dtype, head_dim: int, group: int) -> str:
    """Return the name of a table entry: "attention causal bfloat16 64 x1". `group` is query heads per key head."""
    return f"attention {kind} {str(dtype).removeprefix('torch.')} {head_dim} x{group}"


def attention_kind(lengths=None, window=None, starts=None) -> str:
    """Return the kind of attention that an entry is for: "causal", "window documents", "causal decode", ..."""
    words = []
    if window is not None:
        words.append("window")
    if starts is not None:
        words.append("documents")
    if not words:
        words.append("causal")
    if lengths is not None:
        words.append("decode")
    return " ".join(words)


def unavailable(device: torch.device) -> str | None:
    """Read the tables of `device` for later calls of attention(). Return a reason if they have no entry, else None."""
    choices = {}
    for name, backend_by_length in merged_table(device).items():
        if not name.startswith("attention "):  # launch parameters of a kernel
            continue
        # A table may name a backend whose file no longer exists
        existing = {length: impl for length, impl in backend_by_length.items() if impl in impls("attention")}
        if existing:
            choices[name] = length_ranges(existing)
    _choices[device.type] = choices
    return None if choices else f"nothing was measured on this device yet: run {FILL_COMMAND}"


def length_ranges(backend_by_length: dict[str, str]) -> list[tuple[float, str, Callable]]:
    """Return (upper bound of T, backend's name, its function) for each measured T, shortest T first.

    The bound between two measured T is their geometric mean, because below it the smaller T is nearer by ratio.
    """
    lengths = sorted(map(int, backend_by_length))
    bounds = [math.sqrt(a * b) for a, b in pairwise(lengths)] + [math.inf]
    names = [backend_by_length[str(length)] for length in lengths]
    return [(bound, name, backend("attention", name).attention) for bound, name in zip(bounds, names, strict=True)]


def choose_backend(q, k, lengths=None, window=None, starts=None) -> tuple[str, Callable]:
    """Return the name and the function of the backend for these inputs.

    Raises Unavailable if the tables have no entry for this kind of attention, dtype, head dim and number of query heads
    per key head.
    """
    group = q.shape[2] // k.shape[2]
    name = entry_name(attention_kind(lengths, window, starts), q.dtype, q.shape[3], group)
    for bound, impl, function in _choices[q.device.type].get(name, ()):
        if k.shape[1] <= bound:
            return impl, function
    options = ""
    if window is not None:
        options += f" window={window}"
    if starts is not None:
        options += " documents=512"
    dtype = str(q.dtype).removeprefix("torch.")
    options += f" heads={q.shape[2]} kv_heads={k.shape[2]} head_dim={q.shape[3]} dtype={dtype}"
    raise Unavailable(f"attn=auto: nothing was measured for `{name}` on this device: run {FILL_COMMAND}{options}")


def omit_none(**limits) -> dict:
    """Return the limits that are not None; a backend may lack the arguments for the others."""
    return {name: limit for name, limit in limits.items() if limit is not None}


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None):
    limits = omit_none(lengths=lengths, window=window, starts=starts)
    _, function = choose_backend(q, k, **limits)
    return function(q, k, v, causal=causal, scale=scale, **limits)


def detail(q, k, lengths=None, window=None, starts=None, **rest) -> str:
    """Return the backend's name and, if it has one, its own detail()."""
    limits = omit_none(lengths=lengths, window=window, starts=starts)
    name, _ = choose_backend(q, k, **limits)
    backend_detail = getattr(backend("attention", name), "detail", None)
    return f"{name}: {backend_detail(q=q, k=k, **limits, **rest)}" if backend_detail else name
