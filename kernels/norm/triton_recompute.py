"""The LayerNorm of triton.py with a backward that starts from the output y, so autograd need not save the stream.

With triton.py, autograd saves the residual stream for the backward: each norm saves C numbers a token, in the dtype of
the stream. The output y is in memory anyway, because the matmul that reads y saves it for the gradient of its weight.
From y the backward can recompute xhat:

    y = xhat weight + bias    so    xhat = (y - bias) / weight

Besides y, the backward needs only rstd, 4 bytes a row. The method is the invertible LayerNorm of NVIDIA's apex
(memory_efficient=True). At 124M, with 25 norms, it saves 77 KB a token for an fp32 stream, and 38 KB for a bf16 stream.

The price is rounding. In bf16, rounding moves y by up to 2^-8 of y, and so xhat by up to 2^-8 of |y / weight|, where
y / weight = xhat + bias / weight. At |bias / weight| = 16 this is up to about 0.06. If a column has a larger ratio (in
fp32: above 1024), or its weight is 0, then its dweight and all of dx are NaN. So the optimizer refuses the step, and
why_nan() gives the reason. The bytes are as many as with triton.py, because the same kernels run.
"""

from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.norm import _triton_backward
from kernels.norm._triton_backward import max_ratio, triton_backward
from kernels.norm.triton import apply_to_rows, empty_outputs, forward

RUNS = "norm_(fwd|recompute)", "norm_bwd"
FAMILY = "_norm_"


def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _triton_backward.setup_context(ctx, inputs, output)
    _, _, weight, bias, _ = inputs
    y, _, _, rstd = output
    ctx.save_for_backward(y, weight, bias, None, rstd)  # in place of the stream and its mean


norm_recompute = custom_op("hotswap::norm_recompute", forward, empty_outputs, triton_backward, setup_context)


def why_nan(weight: Tensor, bias: Tensor | None, op: str = "norm") -> str | None:
    """Return why these parameters make gradients NaN. Return None if they do not. Synchronises."""
    limit, is_small = max_ratio(weight.dtype), weight == 0
    if bias is not None:
        is_small |= ~(bias.abs() <= limit * weight.abs())
    if not (count := int(is_small.sum())):
        return None
    small = "0" if bias is None else f"too small: 0, or |weight| < |bias| / {limit:g}"
    return (
        f"{op}=triton_recompute divides by the weights, and {count} of {len(weight)} are {small}; choose "
        f"kernels.{op}=triton"
    )


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    return apply_to_rows(norm_recompute, x, residual, weight, bias, eps)
