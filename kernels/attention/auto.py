"""Call the backend that was measured to be the fastest for such inputs on this GPU.

See kernels/fastest.py. `python -m scripts.bench_attention auto=true` fills the entries of attention alone. There is one
entry for each kind of attention (causal, window, documents, window and documents; each also as a decoding step), dtype,
head dim and number of query heads per key head. A call takes the backend of the measured T that is nearest to its
number of keys by ratio.
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import fastest
from kernels.registry import Unavailable, describe_choice

deterministic = False  # the backend that it calls may be nondeterministic
unavailable = partial(fastest.unavailable, "attention")


def entry_name(kind: str, dtype: torch.dtype, head_dim: int, group: int) -> str:
    """Return the name of a table entry: "attention causal bfloat16 64 x1". `group` is query heads per key head."""
    return f"attention {kind} {str(dtype).removeprefix('torch.')} {head_dim} x{group}"


def attention_kind(
    lengths: Tensor | bool | None = None, window: int | None = None, starts: Tensor | None = None
) -> str:
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


def choose_backend(
    q: Tensor,
    k: Tensor,
    causal: bool = True,
    lengths: Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
    **_: object,
) -> tuple[str, ModuleType]:
    """Return the name and the module of the backend for these inputs.

    If the fastest one refuses them, for example because a cache has more keys than there are queries, it is the backend
    of a decoding step, which takes any. Raises Unavailable if the tables have no entry for this kind of attention,
    dtype, head dim and number of query heads per key head.
    """
    group = q.shape[2] // k.shape[2]
    name = entry_name(attention_kind(lengths, window, starts), q.dtype, q.shape[3], group)
    chosen = fastest.find_backend("attention", name, k.shape[1], q.device)
    if chosen and fastest.refuses(chosen[1], q, k, causal=causal):
        name = entry_name(attention_kind(True, window, starts), q.dtype, q.shape[3], group)
        chosen = fastest.find_backend("attention", name, k.shape[1], q.device)
    if chosen:
        return chosen
    options = ""
    if window is not None:
        options += f" window={window}"
    if starts is not None:
        options += " documents=512"
    dtype = str(q.dtype).removeprefix("torch.")
    options += f" heads={q.shape[2]} kv_heads={k.shape[2]} head_dim={q.shape[3]} dtype={dtype}"
    raise Unavailable(
        f"attn=auto: nothing was measured for `{name}` on this device: run python -m scripts.bench_attention "
        f"auto=true{options}"
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    limits = {"lengths": lengths, "window": window, "starts": starts}
    limits = {name: limit for name, limit in limits.items() if limit is not None}  # a backend may lack the others
    _, module = choose_backend(q, k, causal, **limits)
    return module.attention(q, k, v, causal=causal, scale=scale, **limits)


def detail(**inputs: Any) -> str:
    """Return the backend's name and, if it has one, its own detail()."""
    name, _ = choose_backend(**inputs)
    return describe_choice("attention", name, **inputs)
