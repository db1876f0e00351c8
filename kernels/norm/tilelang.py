"""LayerNorm in TileLang (https://github.com/tile-ai/tilelang), with the addition fused forward and backward.

The method and the bytes are those of triton.py: 4 passes over (N, C) forward and 4 backward. A copy of these bytes is
the floor. The difference is which threads hold a row. In Triton a row is padded to a power of two, and a
program of several warps may share it. Here the program says which thread holds which numbers (row_layout() in
_tilelang.py):

    forward   a warp holds a row of up to 2048 numbers, in vectors of 16 bytes. For C = 768 a thread loads three
              vectors, without a mask. The two sums of a row are shuffles within the warp, without a barrier. ptxas
              gives a thread 63 registers in bf16, so a multiprocessor loads 32 rows at a time
    backward  a program loops over its rows, four at a time for C = 768. A thread always has the same columns, so it
              sums dy xhat and dy in registers. At the end the warps of a program add their sums in shared memory,
              and it writes them once in fp32. A second kernel adds the sums of all programs in a fixed order, so every
              run gives the same bits. A thread has 128 registers, so a multiprocessor loads 16 rows at a time

A row of more than 2048 numbers, in the backward of more than 1024, belongs to several warps, which meet in shared
memory. kernels/tilelang.py says what a compilation needs.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.gpu import align, multiprocessors
from kernels.norm._op import check_rows, define_norm
from kernels.norm._triton_backward import empty_norm_gradients
from kernels.norm.triton import empty_outputs
from kernels.tilelang import add_partial_sums, detail, dtype_name, launch, unavailable, vector_width  # noqa: F401

RUNS = "tilelang_norm_fwd", "tilelang_norm_bwd"
FAMILY = "tilelang_norm_|tilelang_sum_rows"
THREADS = 128  # of a program with narrow rows


class RowLaunch(NamedTuple):
    """Which threads hold the rows of a program."""

    vec: int  # adjacent numbers that a thread loads at once
    lanes: int  # threads that hold a row
    rows: int
    programs: int | None = None  # for each multiprocessor, in the backward


def share_rows(C: int, vec: int, held: int) -> RowLaunch:
    """Return which threads hold rows of width C. A thread holds at most about `held` numbers of a row."""
    lanes = min(32, triton.next_power_of_2(triton.cdiv(C, vec)))
    lanes = max(lanes, triton.next_power_of_2(triton.cdiv(C, held)))
    return RowLaunch(vec, lanes, rows=max(1, THREADS // lanes))


def forward_launch(C: int, vec: int) -> RowLaunch:
    return share_rows(C, vec, held=64)


def backward_launch(C: int, vec: int, stream_bytes: int) -> RowLaunch:
    """Return the launch of the backward, for elements of the stream of so many bytes.

    Up to 24 numbers of a row, of 2 bytes each, take 128 registers, so 16 warps fit. More, or fp32, take up to 168.
    """
    row_launch = share_rows(C, vec, held=32)
    few = triton.cdiv(C, row_launch.lanes) <= 24 and stream_bytes == 2
    programs = (512 if few else 384) // (row_launch.lanes * row_launch.rows)
    return row_launch._replace(programs=max(1, programs))


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) to y, the new stream, mean and rstd. Without a residual, the stream is empty.

    Without `centred` it is RMSNorm, and mean is empty.
    """
    from kernels.norm import _tilelang

    C, (y, stream, mean, rstd) = x.shape[1], empty_outputs(x, residual, weight, centred=centred)
    wide = x if residual is None else residual
    kernel = _tilelang.norm_fwd(
        C,
        forward_launch(C, vector_width(C, x, wide, weight)),
        has_residual=residual is not None,
        has_bias=bias is not None,
        centred=centred,
        x_dtype=dtype_name(x),
        stream_dtype=dtype_name(wide),
        dtype=dtype_name(weight),
    )
    launch(
        kernel,
        x=align(x),
        residual=align(residual),
        weight=align(weight),
        bias=align(bias),
        y=y,
        stream=None if residual is None else stream,
        mean=mean if centred else None,
        rstd=rstd,
        eps=eps,
    )
    return y, stream, mean, rstd


def launch_backward(
    stream: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_dtype: torch.dtype,
    stream_dtype: torch.dtype,
    dy: Tensor,
    dstream: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx, dresidual, dweight and dbias, as launch_backward() of _triton_backward.py does."""
    from kernels.norm import _tilelang

    N, C = stream.shape
    dx, dresidual, _, dbias = empty_norm_gradients(stream, weight, bias, x_dtype, stream_dtype)
    second = dresidual if x_dtype != stream_dtype else None  # otherwise dresidual is dx
    centred = len(mean) == N  # otherwise it is RMSNorm
    row_launch = backward_launch(C, vector_width(C, stream, weight, dx), stream.element_size())
    kernel = _tilelang.norm_bwd(
        C,
        row_launch,
        has_dstream=dstream is not None,
        has_bias=bias is not None,
        has_dresidual=second is not None,
        centred=centred,
        x_dtype=dtype_name(dx),
        stream_dtype=dtype_name(stream),
        dtype=dtype_name(weight),
    )
    programs = min(triton.cdiv(N, row_launch.rows), row_launch.programs * multiprocessors(stream.device))
    partial = torch.empty(2, programs, C, dtype=torch.float32, device=stream.device)
    launch(
        kernel,
        dy=align(dy),
        dstream=align(dstream),
        stream=align(stream),
        weight=align(weight),
        mean=mean if centred else None,
        rstd=rstd,
        dx=dx,
        dresidual=second,
        dweight=partial[0],
        dbias=None if bias is None else partial[1],
    )
    dweight = add_partial_sums(partial[0], weight.dtype)
    return dx, dresidual, dweight, dbias if bias is None else add_partial_sums(partial[1], weight.dtype)


norm, rms_norm = define_norm("tilelang", run_forward, launch_backward, functools.partial(check_rows, impl="tilelang"))
