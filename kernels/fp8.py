"""Matrix products in fp8: how a tensor is rounded to 8 bits, and a linear layer of three such products.

Inputs and weights are in e4m3 (3 bits of mantissa, up to 448), gradients in e5m2 (2 bits, up to 57,344), as in
Micikevicius et al. 2022, arXiv:2209.05433:

    y = x weight^T        dx = dy weight        dweight = dy^T x

A tensor is multiplied by a scale before it is rounded, and a product is multiplied by both units, 1 / scale. The scales
are powers of two, so that they round nothing:

    x       4: inputs of linear layers follow a norm, an attention or GELU, so they are around 1; up to 112
    weight  the largest at which its largest element fits
    dy      64 times its rows, rounded up to a power of two, because the loss is a mean over them; up to at least 448 /
            rows. In a tiny model, dy times rows had a deviation of 2e-4 to 0.15. Logits: see kernels/loss/__init__.py

The op linear computes dweight of a square weight in the dtype of x, because fp8 gains nothing there: 739 TFLOP/s
instead of 680 for (768 x 65,536) x (65,536 x 768), for which x and dy would have to be stored by columns, too. The
output projection of attention is square in GPT-2. With model.head_dim it may not be, and then its dweight is in fp8.

With fast accumulation, a Hopper tensor core adds 32 products at a time to a sum of some 14 bits, and cuts off the rest.
So long sums become too small. At 124M a weight's gradient is a sum over 65,536 tokens: the gradient of QKV's weight had
0.67 of its size, and the mean loss of steps 81 to 120 was 0.09 above bf16's. Without fast accumulation, the tensor core
computes short sums, which are added in fp32. So product() uses fast accumulation only for sums of up to 4096 products.
The logits never use it, because their error goes into every gradient: where fast logits remained, the gradient was off
by 0.095 of its norm, and by 0.090 with only the loss in fp8. On an H100 a step took 90.2 ms with fast accumulation in
all sums, 91.6 with it in sums of up to 4096, and 93.2 without it.

The scales of x and dy are fixed, so they need neither a pass over the tensor nor a state. The scale of a weight needs
one pass. A number beyond the range becomes the largest one. Infinity becomes NaN, so a diverged step is still noticed.
"""

import contextlib
import os
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from kernels.compat import is_statically_true
from kernels.direct import refuse_second_derivative

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X_SCALE = 4.0
DY_SCALE = 64.0  # times the rows
LONGEST_FAST_SUM = 4096  # products
PTXAS_PATHS = "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"  # the GPU and Triton decide which of them counts


@dataclass(frozen=True)
class InFp8:
    """The output of a norm in the two layouts that the products of a linear layer need (kernels/quantize.py).

    `tensor` (..., C) has the shape and the dtype, and gets the gradient. It has no values: its strides are 0, and its
    memory is never written. `rows` and `columns` are x (N, C) in e4m3, times X_SCALE.
    """

    tensor: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device


def unavailable(device: torch.device) -> str | None:
    """Return why products in fp8 cannot run on `device`, or None. A CPU computes them in fp32."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "it needs an NVIDIA GPU of compute capability 8.9 or newer: choose precision=bf16"
    return None


def choose_ptxas(device: torch.device) -> str | None:
    """Make Triton use ptxas 13.0 or newer. Return None, or why this machine has no such ptxas.

    torch.compile's kernels store an operand by rows and by columns, and older versions compile such a kernel to wrong
    code (kernels/quantize.py explains it). With ptxas 12.8, 124M did not learn.
    """
    if device.type != "cuda":
        return None
    from torch.utils.cpp_extension import CUDA_HOME
    from triton import knobs

    tools = []
    for name in ("ptxas", "ptxas_blackwell"):
        with contextlib.suppress(RuntimeError):  # this build of Triton lacks the file
            tools.append(getattr(knobs.nvidia, name))
    if CUDA_HOME:
        tools.append(knobs.NvidiaTool.from_path(f"{CUDA_HOME}/bin/ptxas"))
    tools = [tool for tool in tools if tool]
    newer = [tool.path for tool in tools if float(tool.version) >= 13]
    if not newer:
        found = ", ".join(tool.version for tool in tools) or "none"
        return (
            f"it needs ptxas 13.0 or newer, and the versions here are {found}: set TRITON_PTXAS_PATH to a newer one, "
            "or choose kernels.compile=false"
        )
    os.environ.update(dict.fromkeys(PTXAS_PATHS, newer[0]))
    return None


def quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | float) -> Tensor:
    """Return x times scale, rounded to an fp8 dtype."""
    largest = torch.finfo(dtype).max
    return torch.where(x.isfinite(), (x * scale).clamp(-largest, largest), torch.nan).to(dtype)


def weight_scale(weight: Tensor) -> Tensor:
    """Return the largest power of two at which the largest element of `weight` fits in e4m3, a scalar in fp32."""
    largest = weight.detach().abs().amax().float().clamp(min=2**-60)
    ratio = torch.finfo(E4M3).max / largest
    power_of_two = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)  # log2() would round 1023.999 up to 1024
    return torch.where(largest.isfinite(), power_of_two, torch.nan)


def gradient_scale(rows: Tensor, scale: float = DY_SCALE) -> Tensor:
    """Return `scale` times the rows, rounded up to a power of two. `rows` and the result are scalars on the device."""
    return scale * torch.exp2(torch.ceil(torch.log2(rows.float())))


def product(
    a: Tensor,
    b: Tensor,
    units: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast: bool = True,
) -> Tensor:
    """a (M, K) and b (N, K) in fp8 -> a b^T units[0] units[1] + bias, (M, N) in `dtype`, contiguous.

    `units` are 1 / scale of a and of b, scalars in fp32 on the device. With `fast`, a GPU uses fast accumulation if a
    sum has at most 4096 products. Other sums are in fp32, or in float64 if that is `dtype`.
    """
    if bias is not None and dtype == torch.float32:  # cuBLAS adds only biases in 16 bits
        return product(a, b, units, dtype, fast=fast) + bias
    if a.is_cuda and dtype != torch.float64:
        columns, a, b = len(b), pad(a, rows=1), pad(b)
        bias = F.pad(bias, (0, len(b) - columns)) if bias is not None and len(b) > columns else bias
        fast = fast and is_statically_true(a.shape[1] <= LONGEST_FAST_SUM)
        out = torch._scaled_mm(a, b.T, *units, bias=bias, out_dtype=dtype, use_fast_accum=fast)
        return out[:, :columns].contiguous() if columns < len(b) else out
    sums = torch.promote_types(dtype, torch.float32)
    out = a.to(sums) @ b.to(sums).T * (units[0] * units[1])
    out = out if bias is None else out + bias
    return out if dtype == sums else out.to(dtype)  # with a cast that does nothing, torch 2.11 compiles zero gradients


def pad(x: Tensor, rows: int = 16) -> Tensor:
    """Return x (N, K) in fp8, contiguous, with zeros up to multiples of `rows` and of 16, which a GPU needs."""
    x, missing = x.contiguous(), (0, -x.shape[1] % 16, 0, -len(x) % rows)
    if all(is_statically_true(number == 0) for number in missing):
        return x  # F.pad() would copy it
    return F.pad(x.view(torch.uint8), missing).view(x.dtype)


class Linear(torch.autograd.Function):
    """Map x (N, C), weight (F, C) and bias (F,) or None to x weight^T + bias (N, F) in x's dtype."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dy_scale: Tensor,
        dweight_in_fp8: bool,
        fast: bool,
    ) -> Tensor:
        scale = weight_scale(weight)
        x8, weight8 = quantize(x, E4M3, X_SCALE), quantize(weight, E4M3, scale)
        x_unit, weight_unit = torch.full_like(scale, 1 / X_SCALE), 1 / scale
        ctx.save_for_backward(x8 if dweight_in_fp8 else x, x_unit, weight8, weight_unit, dy_scale)
        ctx.dtype, ctx.has_bias, ctx.dweight_in_fp8 = x.dtype, bias is not None, dweight_in_fp8
        return product(x8, weight8, (x_unit, weight_unit), x.dtype, bias, fast)

    @staticmethod
    @refuse_second_derivative
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, x_unit, weight8, weight_unit, dy_scale = ctx.saved_tensors
        dy8, dy_unit = quantize(dy, E5M2, dy_scale), 1 / dy_scale
        dx = product(dy8, weight8.T, (dy_unit, weight_unit), ctx.dtype)
        dweight = product(dy8.T, x.T, (dy_unit, x_unit), ctx.dtype) if ctx.dweight_in_fp8 else dy.T @ x
        return dx, dweight, dy.sum(0) if ctx.has_bias else None, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dy_scale: Tensor | None = None,
    dweight_in_fp8: bool = True,
    fast: bool = True,
) -> Tensor:
    """x (..., C), weight (F, C), bias (F,) or None -> (..., F).

    `dy_scale` replaces the scale of the gradient. `fast` is product()'s, for the output.
    """
    rows = x.flatten(0, -2)
    if dy_scale is None:  # torch.full() does not wait for the GPU
        dy_scale = gradient_scale(torch.full((), max(1, len(rows)), device=x.device))
    return Linear.apply(rows, weight, bias, dy_scale, dweight_in_fp8, fast).view(*x.shape[:-1], len(weight))
