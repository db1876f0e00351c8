"""The RMSNorm of triton.py with a backward that starts from the output y, so autograd need not save the stream.

It is kernels/norm/triton_recompute.py without the mean and the bias: xhat = y / weight. Rounding moves y by at most a
relative 2^-8 in bf16, and xhat by as much. Only a weight of 0 makes its dweight and all of dx NaN. The optimizer then
refuses the step, and why_nan() gives the reason. At C = 768 and 25 norms it saves 38 KB a token.
"""

from functools import partial

from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.norm import triton_recompute as layer_norm
from kernels.norm._triton_backward import backward, norm_bwd
from kernels.norm.triton import apply_to_rows
from kernels.rms_norm.triton import empty, forward

RUNS = "norm_(fwd|recompute)", "norm_bwd"
FAMILY = "_norm_"


_backward = partial(backward, operator=lambda *arguments: norm_bwd(*arguments, False))  # not centred
rms_norm_recompute = custom_op("hotswap::rms_norm_recompute", forward, empty, _backward, layer_norm.setup_context)


def why_nan(weight: Tensor) -> str | None:
    """Return why this weight makes gradients NaN. Return None if it does not. Synchronises."""
    return layer_norm.why_nan(weight, None, "rms_norm")


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    return apply_to_rows(rms_norm_recompute, x, residual, weight, None, eps, "rms_norm")
