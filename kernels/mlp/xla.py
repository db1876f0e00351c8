"""Two matmuls and the activation between them, compiled by XLA, the compiler of JAX.

XLA fuses the bias and the activation into one kernel, or into the epilogue of the first matmul. The backward keeps the
product of the first matmul, as triton_recompute.py does, and recomputes the activation in one pass with its derivative.
"""

from typing import Any

from torch import Tensor

from kernels import xla
from kernels.linear.xla import linear_in_jax
from kernels.xla import RUNTIME, detail, unavailable  # noqa: F401


def mlp_in_jax(x: Any, w_fc: Any, b_fc: Any, w_proj: Any, b_proj: Any, activation: str) -> Any:
    """Compute mlp() for JAX's arrays, the activation in fp32."""
    import jax
    import jax.numpy as jnp

    h = linear_in_jax(x, w_fc, b_fc)
    wide = h.astype(jnp.promote_types(h.dtype, jnp.float32))
    a = jax.nn.gelu(wide, approximate=True) if activation == "gelu" else jnp.square(jax.nn.relu(wide))
    return linear_in_jax(a.astype(h.dtype), w_proj, b_proj)


def mlp(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, activation: str = "gelu"
) -> Tensor:
    return xla.call("mlp", mlp_in_jax, x, w_fc, b_fc, w_proj, b_proj, activation=activation)
