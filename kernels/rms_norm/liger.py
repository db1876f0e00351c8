"""The RMSNorm of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989), with the addition fused forward and backward.

Its mode "gemma" computes in fp32 and rounds y once. Its mode "llama" rounds the normalised rows, and then y again, as
Hugging Face's Llama does. Liger writes all outputs in the dtype of x. So if the stream is wider, this file converts x
before the call and y after it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.norm.liger import detail  # noqa: F401

RUNS = "rms_norm_forward|liger_rms_norm_fwd", "rms_norm_backward|liger_rms_norm_bwd"
FAMILY = "_norm_"
OFFSET = 0.0  # added to the weight
MODE = 1  # "gemma"


def unavailable(device: torch.device) -> str | None:
    symbol = "liger_kernel.ops.fused_add_rms_norm.fused_add_rms_norm_backward"
    return package_unavailable("liger-kernel", symbol) or gpu_unavailable(device)


def launch_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) in one dtype to y, the new stream, and rstd. Without residual, the stream is empty."""
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
    from liger_kernel.ops.rms_norm import rms_norm_forward

    if residual is None:
        y, _, rstd, *_ = rms_norm_forward(x, weight, eps, OFFSET, MODE, None)
        return y, x.new_empty(0), rstd
    y, stream, rstd, *_ = fused_add_rms_norm_forward(x, residual, weight, eps, OFFSET, MODE)
    return y, stream, rstd


def empty_outputs(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    stream = x.new_empty(0) if residual is None else torch.empty_like(x)
    return torch.empty_like(x), stream, x.new_empty(x.shape[0], dtype=torch.float32)


def launch_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient (N, C) of x and residual, and dweight (C,)."""
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_backward
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    saved = stream, weight, rstd, OFFSET, MODE, *calculate_settings(stream.shape[1])
    if dstream is None:
        return rms_norm_backward(dy, *saved, in_place=False, row_mode=None)
    dx, _, dweight = fused_add_rms_norm_backward(dy, dstream, *saved, num_stages=2, in_place=False)
    return dx, dweight


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _ = inputs
    _, stream, rstd = output
    ctx.save_for_backward(x if residual is None else stream, weight, rstd)
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)  # rstd and the model's last stream get no gradients


def _backward(ctx: FunctionCtx, dy: Tensor | None, dstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    stream, weight, rstd = ctx.saved_tensors
    dy = torch.zeros_like(stream) if dy is None else dy.contiguous()
    dstream = dstream.contiguous() if ctx.has_residual and dstream is not None else None
    dx, dweight = rms_norm_bwd(dy, dstream, stream, weight, rstd)
    return dx, dx if ctx.has_residual else None, dweight, None


def empty_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return empty_gradients(stream, weight)


rms_norm_bwd = custom_op("hotswap::liger_rms_norm_bwd", launch_backward, empty_backward)
rms_norm_fwd = custom_op("hotswap::liger_rms_norm_fwd", launch_forward, empty_outputs, _backward, _setup_context)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    C = x.shape[-1]
    rows, residual_rows = x.reshape(-1, C).contiguous(), None
    if residual is not None:
        residual_rows = residual.reshape(-1, C).contiguous()
        rows = rows.to(residual.dtype)
    y, stream, _ = rms_norm_fwd(rows, residual_rows, weight, eps)
    return y.view(x.shape).to(weight.dtype), x if residual is None else stream.view(x.shape)
