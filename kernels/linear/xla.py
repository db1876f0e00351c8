"""One matmul with its bias, compiled by XLA, the compiler of JAX. XLA may add the bias in the matmul's epilogue."""

from typing import Any

from torch import Tensor

from kernels import xla
from kernels.xla import RUNTIME, detail, unavailable  # noqa: F401


def linear_in_jax(x: Any, weight: Any, bias: Any) -> Any:
    """Compute linear() for JAX's arrays. A sum with the bias, and its gradient, are in fp32 and rounded once."""
    import jax.numpy as jnp

    y = x @ weight.T
    return y if bias is None else (y.astype(jnp.promote_types(y.dtype, jnp.float32)) + bias).astype(y.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return xla.call("linear", linear_in_jax, x, weight, bias)
