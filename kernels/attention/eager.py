"""The formula, one PyTorch operator after another.

It writes the (B, H, Tq, Tk) scores to memory several times, so its memory is quadratic in T. At B = 64, T = 1024, 12
heads, bf16 the scores of one layer take 1.5 GiB, and autograd saves them for every layer.
"""

import math

from torch import Tensor

from kernels.attention import attention_mask


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
    heads = q.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    if k.shape[1] != heads:
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    limits = {"causal": causal, "lengths": lengths, "window": window, "starts": starts}
    if (mask := attention_mask(q.shape[2], k.shape[2], q.device, **limits)) is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)  # softmax computes in fp32 and rounds only its result
