"""The addition and LayerNorm, compiled by XLA, the compiler of JAX.

XLA fuses each way into a few kernels. The backward keeps the new residual stream, which the next block needs anyway,
and computes the mean and the variance again. Without a residual, the stream is x itself, and XLA computes only y.
"""

from typing import Any

from torch import Tensor

from kernels import xla
from kernels.xla import RUNTIME, detail, unavailable  # noqa: F401


def norm_in_jax(x: Any, residual: Any, weight: Any, bias: Any, eps: float, centred: bool = True) -> Any:
    """Compute norm() for JAX's arrays, in fp32; without `centred`, rms_norm(). Without a residual, return only y."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    stream = x if residual is None else checkpoint_name(residual + x, xla.KEPT)
    h = stream.astype(jnp.promote_types(stream.dtype, jnp.float32))
    if centred:
        h = h - h.mean(-1, keepdims=True)
    y = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + eps) * weight
    y = (y if bias is None else y + bias).astype(weight.dtype)
    return y if residual is None else (y, stream)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    results = xla.call("norm", norm_in_jax, x, residual, weight, bias, tied=(0, 1), eps=eps)
    return (results, x) if residual is None else results
