"""Our LayerNorm in cuTile: the method of triton.py, in NVIDIA's tile language for Python (kernels/cutile.py).

    forward   a block loads a few whole rows of x and residual, and writes the new stream, y, mean and rstd
    backward  a block walks over rows, writes dx = dstream + rstd (g - mean(g) - xhat mean(g xhat)) with g = dy weight,
              and keeps its sums of dy xhat and of dy; a second kernel adds these partial sums in a fixed order

Both move the same bytes as triton.py, 4 passes over (N, C) each in one dtype, so a copy of these bytes is the floor:
for 262,144 rows of 768 in bf16 on an H200, 0.76 ms both ways. The rows of a tile are padded to a power of two: 768
columns to 1024. On Hopper tileiras moves rows of a multiple of 16 bytes by TMA. In the backward it loads the next rows
while a block computes. These rows take 0.544 ms forward and 0.450 backward, and with norm=triton 0.385 and 0.389.
RMSNorm of as many rows of 576 takes 0.427 and 0.345 ms, and with rms_norm=triton 0.290 and 0.296 (commit 3389580).
"""

import functools

import torch
import triton
from torch import Tensor

from kernels.cutile import detail, launch, unavailable  # noqa: F401
from kernels.gpu import multiprocessors
from kernels.norm._op import check_rows, define_norm
from kernels.norm._triton_backward import empty_norm_gradients
from kernels.norm.triton import empty_outputs

RUNS = "cutile_norm_fwd", "cutile_norm_bwd"
FAMILY = "cutile_norm|cutile_sum_rows"
PROGRAMS = 2  # of the backward, for each multiprocessor


def tile_of(C: int) -> tuple[int, int]:
    """Return the columns and the rows of a tile for rows of width C: about 4096 elements, and at least one row."""
    width = triton.next_power_of_2(C)
    return width, max(1, 4096 // width)


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) to y, the new stream, mean and rstd. Without a residual, the stream is empty.

    Without `centred` it is RMSNorm, and mean is empty.
    """
    from kernels.norm._cutile import cutile_norm_fwd

    N, C = x.shape
    width, rows = tile_of(C)
    y, stream, mean, rstd = empty_outputs(x, residual, weight, centred=centred)
    launch(
        cutile_norm_fwd,
        (triton.cdiv(N, rows),),
        x=x,
        residual=x if residual is None else residual,
        weight=weight,
        bias=weight if bias is None else bias,
        y=y,
        stream=y if residual is None else stream,
        mean=mean if centred else rstd,
        rstd=rstd,
        eps=eps,
        C=C,
        BLOCK_C=width,
        ROWS=rows,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        CENTRED=centred,
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
    from kernels._cutile_sums import add_partial_sums
    from kernels.norm._cutile import cutile_norm_bwd

    N, C = stream.shape
    width, rows = tile_of(C)
    programs = min(PROGRAMS * multiprocessors(stream.device), triton.cdiv(N, rows))
    dx, dresidual, _, dbias = empty_norm_gradients(stream, weight, bias, x_dtype, stream_dtype)
    partial = stream.new_empty(2, programs, C, dtype=torch.float32)
    dy, dstream = dy.contiguous(), None if dstream is None else dstream.contiguous()
    has_dresidual = x_dtype != stream_dtype  # otherwise dresidual is dx
    centred = len(mean) == N  # otherwise it is RMSNorm
    launch(
        cutile_norm_bwd,
        (programs,),
        dy=dy,
        dstream=dy if dstream is None else dstream,
        stream=stream,
        weight=weight,
        mean=mean if centred else rstd,
        rstd=rstd,
        dx=dx,
        dresidual=dresidual if has_dresidual else dx,
        dweight=partial[0],
        dbias=partial[1],
        C=C,
        BLOCK_C=width,
        ROWS=rows,
        HAS_DSTREAM=dstream is not None,
        HAS_BIAS=bias is not None,
        HAS_DRESIDUAL=has_dresidual,
        CENTRED=centred,
    )
    dweight = add_partial_sums(partial[0], weight.dtype)
    return dx, dresidual, dweight, dbias if bias is None else add_partial_sums(partial[1], weight.dtype)


norm, rms_norm = define_norm("cutile", run_forward, launch_backward, functools.partial(check_rows, impl="cutile"))
