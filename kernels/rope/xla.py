"""The rotation of queries and keys, and their norm, compiled by XLA, the compiler of JAX.

XLA fuses the rotation and the concatenation with the values into one pass over qkv. The backward needs qkv only with
q_weight and k_weight.
"""

from typing import Any

from torch import Tensor

from kernels import xla
from kernels.xla import RUNTIME, detail, unavailable  # noqa: F401


def rope_in_jax(qkv: Any, table: Any, q_weight: Any, k_weight: Any, kv_heads: int, eps: float) -> Any:
    """Compute rope() for JAX's arrays, in fp32."""
    import jax
    import jax.numpy as jnp

    queries = qkv.shape[2] - 2 * kv_heads
    q, k, v = jnp.split(qkv, (queries, queries + kv_heads), axis=2)
    cos, sin = table
    rotated = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if weight is not None:
            x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * weight
        a, b = jnp.split(x, 2, axis=-1)
        rotated.append(jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(qkv.dtype))
    return jnp.concatenate((*rotated, v), axis=2)


def rope(
    qkv: Tensor,
    table: Tensor,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return xla.call("rope", rope_in_jax, qkv, table, q_weight, k_weight, kv_heads=kv_heads, eps=eps)
