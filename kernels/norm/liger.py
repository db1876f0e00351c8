"""PyTorch's addition, then the LayerNorm of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989).

Liger fuses an addition only into its RMSNorm. So this backend, like eager.py, reads the sum again after writing it.
Liger's LayerNorm always reads a bias, so this file passes zeros if bias is None. Liger writes y in the dtype of the
stream, so this file casts y if the stream is wider than the compute dtype.
"""

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.gpu import gpu_unavailable, package_unavailable, triton_detail

RUNS = "layer_norm_forward|liger_norm_fwd", "layer_norm_backward|liger_norm_bwd"
FAMILY = "_norm_"


def unavailable(device: torch.device) -> str | None:
    missing = package_unavailable("liger-kernel", "liger_kernel.ops.layer_norm.layer_norm_backward")
    return missing or gpu_unavailable(device)  # Triton's interpreter cannot run the eps.to() in Liger's kernel


def detail(**inputs: Any) -> str:
    return f"liger-kernel {version('liger-kernel')}, {triton_detail(**inputs)}"


def launch_forward(stream: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Map a contiguous stream (N, C) to y (N, C) in the dtype of stream, and mean and rstd (N,) in fp32."""
    from liger_kernel.ops.layer_norm import layer_norm_forward

    y, _, mean, rstd, *_ = layer_norm_forward(stream, weight, bias, eps)
    return y, mean, rstd


def empty_outputs(stream: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (stream.new_empty(stream.shape[0], dtype=torch.float32) for _ in range(2))
    return torch.empty_like(stream), mean, rstd


def launch_backward(
    dy: Tensor, stream: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dstream (N, C), dweight (C,) and dbias (C,)."""
    from liger_kernel.ops.layer_norm import layer_norm_backward

    return layer_norm_backward(dy, stream, weight, bias, mean, rstd)


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    stream, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(stream, weight, bias, mean, rstd)


def _backward(ctx: FunctionCtx, dy: Tensor, _dmean: Tensor | None, _drstd: Tensor | None) -> tuple[Tensor | None, ...]:
    return *norm_bwd(dy.contiguous(), *ctx.saved_tensors), None


norm_bwd = custom_op("hotswap::liger_norm_bwd", launch_backward, lambda dy, *saved: empty_gradients(*saved[:3]))
norm_fwd = custom_op("hotswap::liger_norm_fwd", launch_forward, empty_outputs, _backward, _setup_context)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    stream = x if residual is None else residual + x
    stream_rows = stream.reshape(-1, stream.shape[-1]).contiguous()
    y, _, _ = norm_fwd(stream_rows, weight, torch.zeros_like(weight) if bias is None else bias, eps)
    return y.view(x.shape).to(weight.dtype), stream
