"""The fastest of the backends for the shape at hand, by measurements on this very GPU.

`python -m scripts.bench_attention auto=true` times every backend that runs here, forward and backward, and keeps for
each T the fastest of those whose answer is right, in the tables of kernels/tuned.py. A call takes the choice that was
measured for its kind (causal, window, documents, both; a decoding step), dtype, head dim and sharing of keys, at the T
that is nearest by ratio. Nothing is tried while a model trains, and which backend it became is printed and recorded.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from kernels.registry import Unavailable, backend, impls
from kernels.tuned import table

deterministic = False  # as what it becomes need not be
FILL = "python -m scripts.bench_attention auto=true"
# By the device's type; read by unavailable(), for torch.compile follows no file
_choices: dict[str, dict[str, list]] = {}


def entry(kind: str, dtype: torch.dtype, head_dim: int, group: int) -> str:
    """The table's name for a kind of attention: "attention causal bfloat16 64 x1"."""
    return f"attention {kind} {str(dtype).removeprefix('torch.')} {head_dim} x{group}"


def kind(lengths=None, window=None, starts=None) -> str:
    limits = ["window"] * (window is not None) + ["documents"] * (starts is not None) or ["causal"]
    return " ".join(limits + ["decode"] * (lengths is not None))


def unavailable(device: torch.device) -> str | None:
    found = {}
    for name, choice in table(device).items():
        here = {length: impl for length, impl in choice.items() if impl in impls("attention")}  # a file may be gone
        if name.startswith("attention ") and here:
            found[name] = bounded(here)
    _choices[device.type] = found
    return None if found else f"nothing was measured on this device yet: run {FILL}"


def bounded(choice: dict[str, str]) -> list[tuple[float, str, Callable]]:
    """{T: backend} -> (T up to which it is the nearest one, backend, its function), shortest first."""
    lengths = sorted(map(int, choice))
    limits = [math.sqrt(a * b) for a, b in pairwise(lengths)] + [math.inf]
    names = [choice[str(length)] for length in lengths]
    return [(limit, name, backend("attention", name).attention) for limit, name in zip(limits, names, strict=True)]


def pick(q, k, lengths=None, window=None, starts=None) -> tuple[str, Callable]:
    """(name, function). Unavailable: nothing like it was measured."""
    group = q.shape[2] // k.shape[2]
    name = entry(kind(lengths, window, starts), q.dtype, q.shape[3], group)
    for limit, impl, function in _choices[q.device.type].get(name, ()):
        if k.shape[1] <= limit:
            return impl, function
    more = f" window={window}" * (window is not None) + " documents=512" * (starts is not None)
    shape = (
        f" heads={q.shape[2]} kv_heads={k.shape[2]} head_dim={q.shape[3]} dtype={str(q.dtype).removeprefix('torch.')}"
    )
    raise Unavailable(f"attn=auto: nothing was measured for `{name}` on this device: run {FILL}{more}{shape}")


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None):
    limits = {"lengths": lengths, "window": window, "starts": starts}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    _, function = pick(q, k, **limits)
    return function(q, k, v, causal=causal, scale=scale, **limits)


def detail(q, k, lengths=None, window=None, starts=None, **rest) -> str:
    """The backend, and what it says of itself."""
    limits = {"lengths": lengths, "window": window, "starts": starts}
    name, _ = pick(q, k, **limits)
    told = getattr(backend("attention", name), "detail", None)
    given = {key: limit for key, limit in limits.items() if limit is not None}
    return f"{name}: {told(q=q, k=k, **given, **rest)}" if told else name
