"""attention: softmax(q k^T scale) v, every head for itself (Vaswani et al. 2017, arXiv:1706.03762).

    attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None) -> out

    q    (B, Tq, H, D)    compute dtype; views of one packed (B, T, 3, H, D) tensor are usual
    k v  (B, Tk, Hkv, D)  H a multiple of Hkv (grouped queries: head h reads k head h // (H / Hkv)); Tk >= Tq if causal
    out  (B, Tq, H, D)
    scale  positive; None: 1 / sqrt(D)
    lengths  (B,) int32 on the device, or None: keys from lengths[b] on do not exist, whatever stands there (finite);
             1 <= lengths[b] <= Tk, and Tq <= lengths[b] if causal
    window   an int, or None: of what is causal, a query sees the last `window` keys, the one at its own place included
    starts   (B, T) int32 on the device, or None: the first key that each query sees, where its document begins; of
             what is causal, with Tq = Tk and without lengths; starts[b, t] <= t, and never less than starts[b, t - 1]

The causal mask is aligned bottom right: query i sees keys 0 ... i + Tk - Tq, so one new query sees the whole cache;
with lengths it is aligned to lengths[b] instead of Tk. So the shapes of a decoding step stay while its cache fills, as
a CUDA graph wants it (flash-attn calls them cache_seqlens). No gradient is asked for with lengths. A backend that has
no lengths, window or starts leaves the argument out of its function, and whoever asks for it is told so.
"""

from math import sqrt  # and not math: that name becomes this package's own module, math.py

import torch

SHAPES = {
    "124m": {"shape": (32, 1024, 12, 64)},
    "long": {"shape": (2, 16384, 12, 64)},
    "wide": {"shape": (4, 4096, 16, 128)},
    "long-window": {"shape": (2, 16384, 12, 64), "window": 4096},
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


def reference(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None):
    heads, queries, keys = q.shape[2], q.shape[1], k.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * (scale if scale is not None else 1 / sqrt(q.shape[-1]))
    mask = seen(queries, keys, q.device, causal=causal, lengths=lengths, window=window, starts=starts)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def seen(queries, keys, device, *, causal=True, lengths=None, window=None, starts=None):
    """(B or 1, 1, Tq, Tk), True where the query sees the key; None where every query sees every key."""
    end = keys if lengths is None else lengths.view(-1, 1, 1, 1)  # of the keys that a query sees
    if causal and queries > 1:  # a decoding step has one, and each kernel less counts
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
    shape,
    *,
    keys=None,
    kv_heads=None,
    causal=True,
    scale=None,
    lengths=None,
    window=None,
    documents=None,
    magnitude=1.0,
    packed=False,
    contiguous=True,
    dtype,
    device="cpu",
    seed=0,
):
    """Arguments of attention(), q and k of standard deviation `magnitude`; `packed` gives views of one tensor.

    `documents` are the lengths of those that a sequence consists of; every second one has them the other way round.
    """
    generator = torch.Generator(device).manual_seed(seed)
    batch, queries, heads, width = shape
    keys, kv_heads = keys or queries, kv_heads or heads

    def randn(*size, std=1.0):
        return (std * torch.randn(*size, generator=generator, device=device)).to(dtype)

    if packed:
        q, k, v = randn(batch, queries, heads + 2 * kv_heads, width).split((heads, kv_heads, kv_heads), dim=2)
    else:
        wide = width + (0 if contiguous else 8)
        q = randn(batch, queries, heads, wide, std=magnitude)[..., :width]
        k = randn(batch, keys, kv_heads, wide, std=magnitude)[..., :width]
        v = randn(batch, keys, kv_heads, wide)[..., :width]
    tensors = {name: t.detach().requires_grad_() for name, t in {"q": q, "k": k, "v": v}.items()}
    limits = {"window": window}
    if lengths is not None:
        limits["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if documents is not None:
        rows = [documents if row % 2 == 0 else documents[::-1] for row in range(batch)]
        starts = [[sum(row[:i]) for i, length in enumerate(row) for _ in range(length)] for row in rows]
        limits["starts"] = torch.tensor(starts, dtype=torch.int32, device=device)
    return {**tensors, "causal": causal, "scale": scale, **{k: v for k, v in limits.items() if v is not None}}


def cost(
    shape,
    *,
    keys=None,
    kv_heads=None,
    causal=True,
    lengths=None,
    window=None,
    documents=None,
    dtype=torch.bfloat16,
    **_,
):
    """Two products forward and five backward (the scores are formed again), over the pairs that the mask leaves."""
    batch, queries, heads, width = shape
    numbers = 4 * batch * (heads * queries + bool(lengths) + queries * bool(documents))  # lse, and the limits given
    lengths = lengths or [keys or queries] * batch
    if documents:  # each for itself
        pairs = batch * sum(visible(length, length, causal, window) for length in documents)
    else:
        pairs = sum(visible(queries, length, causal, window) for length in lengths)
    read = sum(min(length, queries - 1 + window) if window else length for length in lengths)  # keys, of all rows
    product = 2 * heads * pairs * width
    q_bytes = batch * queries * heads * width * dtype.itemsize
    kv_bytes = 2 * read * (kv_heads or heads) * width * dtype.itemsize
    return {
        "forward": (2 * product, 2 * q_bytes + kv_bytes + numbers),  # q, k, v in; out, lse out
        "backward": (5 * product, 4 * q_bytes + 2 * kv_bytes + numbers),  # q, k, v, out, dout, lse in; dq, dk, dv out
    }


def visible(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """Pairs of a query and a key that it sees: the last query sees most, and the first ones each one more."""
    if not causal:
        return queries * keys
    window = min(window or keys, keys)
    short = max(0, queries - 1 + window - keys)  # queries that see fewer: the first ones, 1, 2, ... fewer from the last
    return queries * window - short * (short + 1) // 2
