"""The norm of triton.py for a consumer in fp8: it writes y in e4m3, by rows and by columns, and never in 16 bits.

As two kernels, the norm would write y, and _quantize_kernel would read it again: 600 MB at N = 65,536 and C = 768. Here
it is 400 MB. A program first adds and centres its rows, as in triton.py, which needs whole rows. To write y by columns
it needs tiles of many rows. So it reads its part of the new stream again, tile by tile, from the L2 cache. It rounds y
to the compute dtype before it rounds to fp8, as the two kernels do. So the bits are equal.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import custom_op
from kernels.fp8 import X_SCALE
from kernels.norm._add_and_centre import add_and_centre, empty_stream
from kernels.norm._triton_backward import setup_context, triton_backward
from kernels.quantize import empty_layouts, scaled, store_columns, store_rows


@triton.jit
def _normalise(stream_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, n, c, N, C, stride, SCALE, CENTRED: tl.constexpr):
    """Return rows n and columns c of y times SCALE, and 0 outside the matrix."""
    mask = (n < N)[:, None] & (c < C)[None, :]
    x = tl.load(stream_ptr + n.to(tl.int64)[:, None] * stride + c[None, :], mask, other=0.0).to(tl.float32)
    if CENTRED:
        x -= tl.load(mean_ptr + n, n < N, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + n, n < N, other=0.0)
    y = x * rstd[:, None] * tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, c < C, other=0.0).to(tl.float32)[None, :]
    y = tl.where(mask, y, 0.0).to(weight_ptr.dtype.element_ty)
    return scaled(y.to(tl.float32), SCALE)


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _norm_fwd_fp8_kernel(
    x_ptr,  # (N, C)
    residual_ptr,  # (N, C), read only with HAS_RESIDUAL
    weight_ptr,  # (C,)
    bias_ptr,  # (C,), or None
    rows_ptr,  # y in e4m3, (N, C rounded up to a multiple of 16)
    columns_ptr,  # y in e4m3, (C, N rounded up to a multiple of 16)
    out_ptr,  # (N, C) the new stream, written only with HAS_RESIDUAL
    mean_ptr,  # (N,) fp32, written only with CENTRED
    rstd_ptr,  # (N,) fp32
    N,
    x_stride,
    residual_stride,
    eps,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,  # False: RMSNorm, of kernels/rms_norm/triton.py
    BLOCK_N: tl.constexpr,  # rows of a program
    TILE_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    inputs = x_ptr, residual_ptr, out_ptr, mean_ptr, rstd_ptr
    for start in tl.range(0, BLOCK_N, ROWS, num_stages=STAGES):
        rows, columns = first + start + tl.arange(0, ROWS), tl.arange(0, BLOCK_C)
        add_and_centre(*inputs, rows, columns, N, x_stride, residual_stride, eps, C, HAS_RESIDUAL, CENTRED)
    tl.debug_barrier()  # the tiles below read what other threads of this program wrote
    stream_ptr, stride = x_ptr, x_stride
    if HAS_RESIDUAL:
        stream_ptr, stride = out_ptr, C
    normed = stream_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr
    quads = tl.program_id(0) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    for start in range(0, C, TILE_C):
        c = start + tl.arange(0, TILE_C)
        y0 = _normalise(*normed, 4 * quads, c, N, C, stride, SCALE, CENTRED)
        y1 = _normalise(*normed, 4 * quads + 1, c, N, C, stride, SCALE, CENTRED)
        y2 = _normalise(*normed, 4 * quads + 2, c, N, C, stride, SCALE, CENTRED)
        y3 = _normalise(*normed, 4 * quads + 3, c, N, C, stride, SCALE, CENTRED)
        store_rows(y0, y1, y2, y3, rows_ptr, quads, c, N, C)
        store_columns(y0, y1, y2, y3, columns_ptr, quads, c, N, C)


def default_launch(C: int) -> dict[str, int]:
    """Return the launch parameters for rows of width C.

    The best of 99 choices for 65,536 rows of 768 on an H100: 0.163 ms. The two kernels take 0.140 and 0.076. With three
    stages, 16,384 rows of 1600 take 0.126 ms instead of 0.106, because fewer programs fit on a multiprocessor.
    """
    width = triton.next_power_of_2(C)
    rows = max(1, min(32, 8192 // width))
    stages = 3 if width <= 1024 else 1
    return {"BLOCK_C": width, "ROWS": rows, "BLOCK_N": 32, "TILE_C": 128, "STAGES": stages, "num_warps": 8}


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do what triton.py's forward() does, with y in e4m3, times X_SCALE, by rows and by columns as further results.

    The first result has y's shape and dtype for autograd, and no values: see InFp8.
    """
    return launch_forward(x, residual, weight, bias, eps, centred=True)


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do what forward() does. Without `centred` it is RMSNorm, and mean is empty."""
    N, C = x.shape
    launch = default_launch(C)
    y, stream, mean, rstd, rows, columns = empty_fp8_outputs(x, residual, weight, centred=centred)
    _norm_fwd_fp8_kernel[(triton.cdiv(N, launch["BLOCK_N"]),)](
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        bias_ptr=bias,
        rows_ptr=rows,
        columns_ptr=columns,
        out_ptr=stream,
        mean_ptr=mean,
        rstd_ptr=rstd,
        N=N,
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        eps=eps,
        SCALE=X_SCALE,
        C=C,
        HAS_RESIDUAL=residual is not None,
        CENTRED=centred,
        **launch,
    )
    return y, stream, mean, rstd, rows, columns


def empty_fp8_outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor, *_: object, centred: bool = True
) -> tuple[Tensor, ...]:
    """Allocate what forward() returns. This is also the operator's fake implementation."""
    y = torch.empty_strided(x.shape, (0, 0), dtype=weight.dtype, device=x.device)
    return y, *empty_stream(x, residual, centred), *empty_layouts(x)


norm_fwd_fp8 = custom_op("hotswap::norm_fwd_fp8", forward, empty_fp8_outputs, triton_backward, setup_context)
