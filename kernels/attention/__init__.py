"""The contract of the op attention: softmax(q k^T scale) v for each head (Vaswani et al. 2017, arXiv:1706.03762).

    attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None) -> out

    q        (B, Tq, H, D), compute dtype; usually a view of one packed (B, T, H + 2 Hkv, D) tensor, as are k and v
    k, v     (B, Tk, Hkv, D); Tk >= Tq if causal; H is a multiple of Hkv, and query head h reads key head
             h // (H / Hkv) (grouped queries). If the backend has FP8_KEYS, they may be float8_e4m3fn
    out      (B, Tq, H, D)
    scale    positive, or None for 1 / sqrt(D)
    lengths  (B,) int32 on the device, or None. Sequence b has only lengths[b] keys; attention ignores the (finite)
             values that are stored after them. 1 <= lengths[b] <= Tk, and Tq <= lengths[b] if causal
    window   an int, or None; for causal attention. A query sees only the last `window` keys up to and including its
             own position
    starts   (B, T) int32 on the device, or None; for causal attention with Tq = Tk and without lengths. Query t sees
             no key before starts[b, t], where its document begins. starts[b, t - 1] <= starts[b, t] <= t

The causal mask is aligned bottom right: query i sees keys 0 ... i + Tk - Tq, so a single new query sees the whole
cache. With lengths, the mask is aligned to lengths[b] instead of Tk. A decoding step then keeps its shapes while the
cache fills, which a CUDA graph requires (flash-attn calls this argument cache_seqlens). Callers ask for no gradient
when they pass lengths.

A backend that does not support lengths, window or starts omits the argument from its function. The registry then raises
Unavailable for a model that needs this argument.
"""

from collections.abc import Sequence
from math import sqrt  # not `import math`: importing the backend math.py sets kernels.attention.math
from typing import Any

import torch
from torch import Tensor

TENSORS = {"q": "B Tq H D", "k": "B Tk Hkv D", "v": "B Tk Hkv D", "lengths": "B", "starts": "B Tq"}
ANY_STRIDES = ("q", "k", "v")
OPTIONAL = ("window", "starts", "lengths")  # arguments that a backend may lack

SHAPES = {
    "124m": {"shape": (32, 1024, 12, 64)},
    "long": {"shape": (2, 16384, 12, 64)},
    "wide": {"shape": (4, 4096, 16, 128)},
    "long-window": {"shape": (2, 16384, 12, 64), "window": 4096},
    "smollm2-135m": {"shape": (64, 1024, 9, 64), "kv_heads": 3},
}

CASES = {
    "64": {"shape": (2, 64, 3, 64)},
    "T=1": {"shape": (2, 1, 3, 64)},
    "T=127": {"shape": (1, 127, 2, 64)},
    "T=129": {"shape": (1, 129, 2, 64)},
    "T=1025": {"shape": (1, 1025, 1, 64)},
    "D=80": {"shape": (1, 33, 2, 80)},
    "D=128": {"shape": (1, 33, 2, 128)},
    "one_head": {"shape": (2, 50, 1, 64)},
    "gqa": {"shape": (2, 40, 6, 64), "kv_heads": 2},
    "mqa": {"shape": (2, 40, 4, 64), "kv_heads": 1},
    "decode": {"shape": (2, 1, 3, 64), "keys": 77},
    "chunk": {"shape": (2, 16, 3, 64), "keys": 77},
    "full": {"shape": (2, 50, 3, 64), "causal": False},
    "scaled": {"shape": (2, 50, 3, 64), "scale": 0.3},
    "large_logits": {"shape": (2, 257, 2, 64), "magnitude": 6.0},
    "packed": {"shape": (2, 50, 3, 64), "packed": True},
    "non_contiguous": {"shape": (2, 50, 3, 64), "contiguous": False},
    "lengths": {"shape": (3, 1, 3, 64), "keys": 77, "lengths": (1, 40, 77)},
    "lengths_chunk": {"shape": (2, 16, 3, 64), "keys": 77, "lengths": (16, 60)},
    "lengths_gqa": {"shape": (2, 1, 6, 64), "keys": 40, "kv_heads": 2, "lengths": (17, 33)},
    "lengths_full": {"shape": (2, 5, 3, 64), "keys": 50, "causal": False, "lengths": (3, 50)},
    "window": {"shape": (2, 129, 2, 64), "window": 40},
    "window=1": {"shape": (1, 50, 2, 64), "window": 1},
    "window>T": {"shape": (1, 50, 2, 64), "window": 64},
    "window_chunk": {"shape": (2, 16, 3, 64), "keys": 77, "window": 20},
    "window_decode": {"shape": (2, 1, 6, 64), "keys": 77, "kv_heads": 2, "window": 20},
    "window_lengths": {"shape": (3, 1, 3, 64), "keys": 77, "lengths": (1, 40, 77), "window": 20},
    "documents": {"shape": (2, 129, 2, 64), "documents": (1, 70, 3, 55)},
    "documents_window": {"shape": (2, 129, 4, 64), "kv_heads": 2, "documents": (90, 39), "window": 33},
}

# The doctor's matrix tests SIZES, by head dim, in every dtype. It tests LENGTHS, by T, and FEATURES, names in CASES, in
# bf16 (on a CPU: fp32)
SIZES = {str(D): {"shape": (2, 128, 2, D)} for D in (64, 80, 96, 128, 256)}
LENGTHS = {str(T): {"shape": (1, T, 2, 64)} for T in (1, 127, 1024)}
FEATURES = ["full", "gqa", "window", "documents", "decode", "lengths"]

BOUND = "flops"
FAMILY = r"(?i)flash|fmha|sdpa|attention|softmax|cudnn::fusion"


def in_model(
    *,
    batch: int,
    length: int,
    n_head: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    documents: bool,
    keys: int | None = None,
    **_: object,
) -> dict[str, Any]:
    """Return the arguments of inputs() for a model's call.

    `keys` is the number of keys in the cache of a decoding step, and None for other calls. Without a cache, q, k and v
    are views of one tensor. `documents` is true if attention stays inside documents.
    """
    options = {"keys": keys, "lengths": [keys] * batch} if keys else {"packed": True}
    if documents:
        options["documents"] = [length]
    return {"shape": (batch, length, n_head, head_dim), "kv_heads": kv_heads, "window": window, **options}


def conflict(q: Tensor, k: Tensor, causal: bool = True, starts: Tensor | None = None, **_: object) -> str | None:
    """Return, in one line, why the sizes of the tensors do not fit together, or None."""
    queries, heads = q.shape[1:3]
    keys, kv_heads = k.shape[1:3]
    if heads and (not kv_heads or heads % kv_heads):
        return f"q has {heads} heads, which is no multiple of the {kv_heads} heads of k and v"
    if starts is not None and queries != keys:
        return f"q has {queries} tokens, and k and v have {keys}: with starts they have the same number"
    if causal and queries > keys:
        return f"q has {queries} tokens, and k and v only {keys}: with causal=True they have at least as many"
    return None


def reference(
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
    """Compute attention in plain PyTorch, in any dtype; the tests take its float64 result as exact."""
    heads, queries, keys = q.shape[2], q.shape[1], k.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * (scale if scale is not None else 1 / sqrt(q.shape[-1]))
    mask = attention_mask(queries, keys, q.device, causal=causal, lengths=lengths, window=window, starts=starts)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def attention_mask(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool = True,
    lengths: Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
) -> Tensor | None:
    """Return a bool mask (B or 1, 1, Tq, Tk), True where the query sees the key; None if every query sees every key."""
    end = keys if lengths is None else lengths.view(-1, 1, 1, 1)  # each query sees keys before `end`
    if causal and queries > 1:  # with one query (a decoding step) the shift is 0, and skipping it saves kernel launches
        end = end - torch.arange(queries - 1, -1, -1, device=device).view(1, 1, -1, 1)
    elif lengths is None and window is None:
        return None
    key = torch.arange(keys, device=device).view(1, 1, 1, -1)
    mask = key < end
    if window is not None:
        mask = mask & (key >= end - window)
    if starts is not None:
        mask = mask & (key >= starts[:, None, :, None])
    return mask


def inputs(
    shape: Sequence[int],
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    lengths: Sequence[int] | None = None,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    magnitude: float = 1.0,
    packed: bool = False,
    contiguous: bool = True,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments for attention(); `shape` is q's (B, Tq, H, D).

    keys        Tk; None for Tq
    kv_heads    Hkv; None for H
    documents   the lengths of the documents in a sequence; every second sequence has them in reverse order
    magnitude   the standard deviation of q and k, unless packed
    packed      q, k and v are views of one tensor
    contiguous  if False, 8 unused channels follow the D channels of each head
    """
    generator = torch.Generator(device).manual_seed(seed)
    batch, queries, heads, width = shape
    keys, kv_heads = keys or queries, kv_heads or heads

    def randn(*size: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(*size, generator=generator, device=device)).to(dtype)

    if packed:
        q, k, v = randn(batch, queries, heads + 2 * kv_heads, width).split((heads, kv_heads, kv_heads), dim=2)
    else:
        allocated = width + (0 if contiguous else 8)
        q = randn(batch, queries, heads, allocated, std=magnitude)[..., :width]
        k = randn(batch, keys, kv_heads, allocated, std=magnitude)[..., :width]
        v = randn(batch, keys, kv_heads, allocated)[..., :width]
    tensors = {name: t.detach().requires_grad_() for name, t in {"q": q, "k": k, "v": v}.items()}
    limits = {} if window is None else {"window": window}
    if lengths is not None:
        limits["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if documents is not None:
        starts = [document_starts(documents if b % 2 == 0 else documents[::-1]) for b in range(batch)]
        limits["starts"] = torch.tensor(starts, dtype=torch.int32, device=device)
    return {**tensors, "causal": causal, "scale": scale, **limits}


def document_starts(documents: Sequence[int]) -> list[int]:
    """Return, for each token of a sequence, where its document begins; `documents` are the documents' lengths."""
    starts = []
    for length in documents:
        starts += [len(starts)] * length
    return starts


def cost(
    shape: Sequence[int],
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    causal: bool = True,
    lengths: Sequence[int] | None = None,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **_: object,
) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes), "backward": (FLOPs, bytes)}. The arguments are as in inputs().

    The forward has two matmuls; the backward has five, because it recomputes the scores. FLOPs count only the
    (query, key) pairs in which the query sees the key. Bytes count every tensor once.
    """
    batch, queries, heads, width = shape
    extra_bytes = 4 * batch * heads * queries  # lse
    if lengths:
        extra_bytes += 4 * batch  # lengths
    if documents:
        extra_bytes += 4 * batch * queries  # starts
    lengths = lengths or [keys or queries] * batch
    if documents:  # no query sees a key of another document
        pairs = batch * sum(visible_pairs(length, length, causal, window) for length in documents)
    else:
        pairs = sum(visible_pairs(queries, length, causal, window) for length in lengths)
    # Keys that any query sees, summed over the batch
    keys_read = sum(min(length, queries - 1 + window) if window else length for length in lengths)
    matmul = 2 * heads * pairs * width
    q_bytes = batch * queries * heads * width * dtype.itemsize
    kv_bytes = 2 * keys_read * (kv_heads or heads) * width * dtype.itemsize
    return {
        "forward": (2 * matmul, 2 * q_bytes + kv_bytes + extra_bytes),  # reads q, k, v; writes out, lse
        # reads q, k, v, out, dout, lse; writes dq, dk, dv
        "backward": (5 * matmul, 4 * q_bytes + 2 * kv_bytes + extra_bytes),
    }


def visible_pairs(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """Return the number of (query, key) pairs in one head of one sequence where the query sees the key."""
    if not causal:
        return queries * keys
    window = min(window or keys, keys)
    # The first `short_queries` queries see fewer than `window` keys. The last of them sees 1 fewer, the first sees
    # short_queries fewer
    short_queries = max(0, queries - 1 + window - keys)
    return queries * window - short_queries * (short_queries + 1) // 2
