"""RMSNorm in TileLang (https://github.com/tile-ai/tilelang): the kernels of kernels/norm/tilelang.py without the mean.

A row has one sum instead of two, and 4 bytes less. The floor is the same copy as of rms_norm=triton.
"""

from functools import partial

from torch import Tensor

from kernels.direct import custom_op
from kernels.norm.tilelang import FAMILY, RUNS, _backward, apply_to_rows, detail, run_forward, unavailable  # noqa: F401
from kernels.norm.triton import empty_outputs, setup_context


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) to y, the new stream, an empty mean, and rstd. bias is None."""
    return run_forward(x, residual, weight, bias, eps, centred=False)


empty = partial(empty_outputs, centred=False)
rms_norm_fwd = custom_op("hotswap::tilelang_rms_norm_fwd", launch_forward, empty, _backward, setup_context)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    return apply_to_rows(rms_norm_fwd, x, residual, weight, None, eps, "rms_norm")
