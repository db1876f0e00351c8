"""Matrix products in fp8: how a tensor is rounded to 8 bits, and a linear layer of three such products.

Inputs and weights are in e4m3 (3 bits of mantissa, up to 448), gradients in e5m2 (2 bits, up to 57,344), as in
Micikevicius et al. 2022, arXiv:2209.05433:

    y = x weight^T        dx = dy weight        dweight = dy^T x

A tensor is multiplied by a scale before it is rounded, and a product is divided by both scales. The scales are powers
of two, so that they round nothing:

    x       4: inputs of linear layers follow a norm, an attention or GELU, so they are around 1; up to 112
    weight  the largest at which its largest element fits
    dy      64 times its rows, because the loss is a mean over them: a gradient times rows is around 1; up to 896

Fixed scales need no pass over the tensor, no state and no history. An element beyond the range becomes the largest
number.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X_SCALE = 4.0
DY_SCALE = 64.0  # times the rows


def unavailable(device: torch.device) -> str | None:
    """Return why products in fp8 cannot run on `device`, or None. A CPU computes them in fp32."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "it needs an NVIDIA GPU of compute capability 8.9 or newer: choose precision=bf16"
    return None


def quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | float) -> Tensor:
    """Return x times scale, rounded to an fp8 dtype."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype)


def weight_scale(weight: Tensor) -> Tensor:
    """Return the largest power of two at which the largest element of `weight` fits in e4m3, a scalar in fp32."""
    largest = weight.detach().abs().amax().float().clamp(min=2**-60)
    return torch.exp2(torch.floor(torch.log2(torch.finfo(E4M3).max / largest)))


def gradient_scale(rows: int, scale: float = DY_SCALE) -> float:
    """Return `scale` times the rows, rounded up to a power of two."""
    return scale * 2 ** math.ceil(math.log2(rows))


def product(a: Tensor, b: Tensor, scale: Tensor | float, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a (M, K) and b (N, K) in fp8 -> a b^T / scale + bias, (M, N) in `dtype`.

    The sums are in fp32, or in float64 if that is `dtype`. On a GPU, a tensor core keeps some 14 bits of them.
    """
    if bias is not None and dtype == torch.float32:  # cuBLAS adds only biases in 16 bits
        return product(a, b, scale, dtype) + bias
    if a.is_cuda and dtype != torch.float64:
        columns, a, b = len(b), pad(a, rows=1), pad(b)
        bias = None if bias is None else F.pad(bias, (0, len(b) - columns))
        scale = torch.as_tensor(scale, dtype=torch.float32, device=a.device)
        scales = 1 / scale, torch.ones_like(scale)
        return torch._scaled_mm(a, b.T, *scales, bias=bias, out_dtype=dtype, use_fast_accum=True)[:, :columns]
    sums = torch.promote_types(dtype, torch.float32)
    out = a.to(sums) @ b.to(sums).T / scale
    return (out if bias is None else out + bias).to(dtype)


def pad(x: Tensor, rows: int = 16) -> Tensor:
    """Return x (N, K) in fp8, contiguous, with zeros up to multiples of `rows` and of 16, which a GPU needs."""
    return F.pad(x.contiguous().view(torch.uint8), (0, -x.shape[1] % 16, 0, -len(x) % rows)).view(x.dtype)


class Linear(torch.autograd.Function):
    """Map x (N, C), weight (F, C) and bias (F,) or None to x weight^T + bias (N, F) in x's dtype."""

    @staticmethod
    def forward(ctx, x, weight, bias, dy_scale):
        scale = weight_scale(weight)
        x8, weight8 = quantize(x, E4M3, X_SCALE), quantize(weight, E4M3, scale)
        ctx.save_for_backward(x8, weight8, scale)
        ctx.dy_scale, ctx.dtype, ctx.has_bias = dy_scale, x.dtype, bias is not None
        return product(x8, weight8, X_SCALE * scale, x.dtype, bias)

    @staticmethod
    def backward(ctx, dy):
        x8, weight8, scale = ctx.saved_tensors
        dy8 = quantize(dy, E5M2, ctx.dy_scale)
        dx = product(dy8, weight8.T, ctx.dy_scale * scale, ctx.dtype)
        dweight = product(dy8.T, x8.T, ctx.dy_scale * X_SCALE, ctx.dtype)
        return dx, dweight, dy.sum(0) if ctx.has_bias else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dy_scale: float = DY_SCALE) -> Tensor:
    """x (..., C), weight (F, C), bias (F,) or None -> (..., F). `dy_scale` is times the rows of x."""
    rows = x.flatten(0, -2)
    return Linear.apply(rows, weight, bias, gradient_scale(len(rows), dy_scale)).view(*x.shape[:-1], -1)
