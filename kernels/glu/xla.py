"""Two matmuls and SwiGLU between them, compiled by XLA, the compiler of JAX.

XLA fuses the bias, silu(gate) and the product with up into one kernel. The backward keeps the product of the first
matmul, gate and up, and recomputes the rest in one pass with the derivatives.
"""

from typing import Any

from torch import Tensor

from kernels import xla
from kernels.linear.xla import linear_in_jax
from kernels.xla import RUNTIME, detail, unavailable  # noqa: F401


def glu_in_jax(x: Any, w_fc: Any, b_fc: Any, w_proj: Any, b_proj: Any) -> Any:
    """Compute glu() for JAX's arrays, SwiGLU in fp32."""
    import jax
    import jax.numpy as jnp

    h = linear_in_jax(x, w_fc, b_fc)
    gate, up = jnp.split(h.astype(jnp.promote_types(h.dtype, jnp.float32)), 2, axis=-1)
    return linear_in_jax((jax.nn.silu(gate) * up).astype(h.dtype), w_proj, b_proj)


def glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    return xla.call("glu", glu_in_jax, x, w_fc, b_fc, w_proj, b_proj)
