"""Liger-Kernel's LayerNorm (Hsu et al. 2024, arXiv:2410.10989) behind an addition by PyTorch.

Liger fuses the addition into its RMSNorm alone, so here the stream is read once more than it must be, as in eager.py.
Its kernel always reads a bias, here zeros where there is none, and writes y in the stream's dtype: a wider stream costs
one cast more.
"""

from importlib.metadata import version

import torch
from torch import Tensor

from kernels.direct import direct
from kernels.gpu import gpu_unavailable, package_unavailable, triton_detail

RUNS = "layer_norm_forward|liger_norm_fwd", "layer_norm_backward|liger_norm_bwd"


def unavailable(device: torch.device) -> str | None:
    missing = package_unavailable("liger-kernel", "liger_kernel.ops.layer_norm.layer_norm_backward")
    return missing or gpu_unavailable(device)  # Triton's interpreter stumbles over its eps.to()


def detail(**inputs) -> str:
    return f"liger-kernel {version('liger-kernel')}, {triton_detail(**inputs)}"


@torch.library.custom_op("hotswap::liger_norm_fwd", mutates_args=())
def norm_fwd(stream: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """stream (N, C), contiguous -> y (N, C) in its dtype, mean and rstd (N,) fp32."""
    from liger_kernel.ops.layer_norm import layer_norm_forward

    y, _, mean, rstd, *_ = layer_norm_forward(stream, weight, bias, eps)
    return y, mean, rstd


@norm_fwd.register_fake
def _(stream, weight, bias, eps):
    mean, rstd = (stream.new_empty(len(stream), dtype=torch.float32) for _ in range(2))
    return torch.empty_like(stream), mean, rstd


@torch.library.custom_op("hotswap::liger_norm_bwd", mutates_args=())
def norm_bwd(
    dy: Tensor, stream: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dstream (N, C), dweight and dbias (C,)."""
    from liger_kernel.ops.layer_norm import layer_norm_backward

    return layer_norm_backward(dy, stream, weight, bias, mean, rstd)


@norm_bwd.register_fake
def _(dy, stream, weight, bias, mean, rstd):
    return torch.empty_like(stream), torch.empty_like(weight), torch.empty_like(bias)


def _setup_context(ctx, inputs, output):
    stream, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(stream, weight, bias, mean, rstd)


def _backward(ctx, dy, _dmean, _drstd):
    return *norm_bwd(dy.contiguous(), *ctx.saved_tensors), None


norm_bwd = direct(norm_bwd)
norm_fwd = direct(norm_fwd, _backward, _setup_context)


def norm(x, residual, weight, bias, eps=1e-5):
    stream = x if residual is None else residual + x
    rows = stream.reshape(-1, stream.shape[-1]).contiguous()
    y, _, _ = norm_fwd(rows, weight, torch.zeros_like(weight) if bias is None else bias, eps)
    return y.view(x.shape).to(weight.dtype), stream
