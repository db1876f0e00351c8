"""The addition and RMSNorm, compiled by XLA, the compiler of JAX: kernels/norm/xla.py without the mean."""

from torch import Tensor

from kernels import xla
from kernels.norm.xla import norm_in_jax
from kernels.xla import RUNTIME, detail, unavailable  # noqa: F401


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    results = xla.call("rms_norm", norm_in_jax, x, residual, weight, None, tied=(0, 1), eps=eps, centred=False)
    return (results, x) if residual is None else results
