"""The formula as einsum, softmax and einsum, compiled by XLA, the compiler of JAX.

XLA fuses the scale, the mask and the softmax between the two matmuls, but each matmul reads and writes memory. So the
(B, H, Tq, Tk) scores and weights take 2 bytes each in bf16, and the backward keeps the scores: 1.5 GiB a layer at
B = 64, T = 1024, 12 heads. It recomputes the weights. It does not use cuDNN's attention, which
jax.nn.dot_product_attention can call. A packed q, k and v are copied, because XLA takes only contiguous tensors.
"""

import math
from typing import Any

from torch import Tensor

from kernels import xla
from kernels.xla import RUNTIME, detail, unavailable  # noqa: F401


def attention_in_jax(
    q: Any, k: Any, v: Any, lengths: Any, starts: Any, causal: bool, scale: float, window: int | None
) -> Any:
    """Compute attention() for JAX's arrays, the softmax in fp32."""
    import jax
    import jax.numpy as jnp

    B, queries, heads, D = q.shape
    keys, kv_heads = k.shape[1:3]
    groups = q.reshape(B, queries, kv_heads, heads // kv_heads, D)  # of query heads that read the same key head
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", groups, k)
    scores = scores.astype(jnp.promote_types(q.dtype, jnp.float32)) * scale
    end = keys if lengths is None else lengths[:, None, None]  # query i sees keys before end - queries + 1 + i
    if causal:
        end = end - queries + 1 + jnp.arange(queries)[:, None]
    key = jnp.arange(keys)
    mask = key < end
    if window is not None:
        mask = mask & (key >= end - window)
    if starts is not None:
        mask = mask & (key >= starts[:, :, None])
    mask = jnp.broadcast_to(mask, (B, queries, keys))[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(q.shape)


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
    options = {"causal": causal, "scale": 1 / math.sqrt(q.shape[-1]) if scale is None else scale, "window": window}
    return xla.call("attention", attention_in_jax, q, k, v, lengths, starts, **options)
