"""Attention, in plain PyTorch. Say here what the kernel does, why it is fast, and whose idea it is.

    q        (B, Tq, H, D)    often a view of one packed tensor with k and v, so not contiguous
    k, v     (B, Tk, Hkv, D)  H is a multiple of Hkv, and query head h reads key head h // (H / Hkv)
    causal   True: a query sees no key after its position. The last query is at the last key: if Tq < Tk, the first
             Tk - Tq keys are from before
    scale    of the scores; None: 1 / sqrt(D)
    lengths  (B,) int32, or None: only the first lengths[b] keys of sequence b exist, and the last query is at the last
             of them. Generation passes it, because its cache has more rows than tokens. It asks for no gradient
    window   int, or None: a query sees only the last `window` keys up to its position (model.window)
    starts   (B, T) int32, or None: query t sees no key before starts[b, t], the first token of its document
             (data.mask_documents=true)

It returns (B, Tq, H, D). The contract is kernels/attention/__init__.py. A function without lengths, window or starts
still trains; what needs the argument is then refused, with the reason: without lengths, generation.
"""

import math

from torch import Tensor

from kernels.attention import attention_mask

# Your Triton kernel goes here. course/10_attention_naive.py is an example, and kernels/README.md lists the steps.


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
    heads, width = q.shape[2:]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(width) if scale is None else scale)  # (B, H, Tq, Tk)
    limits = {"causal": causal, "lengths": lengths, "window": window, "starts": starts}
    mask = attention_mask(q.shape[2], k.shape[2], q.device, **limits)  # True where a query sees a key
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)
