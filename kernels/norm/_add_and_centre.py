"""The core of the forward kernels in triton.py and _fp8.py: add, then subtract the mean and compute rstd.

With CENTRED=False it is the core of RMSNorm (kernels/rms_norm/): the mean is neither subtracted nor written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_and_centre(
    x_ptr,
    residual_ptr,
    out_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    columns,
    N,
    x_stride,
    residual_stride,
    eps,
    C: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Write the new stream, mean and rstd of some rows. Return the rows less their mean, and rstd."""
    in_row = columns < C
    mask = (rows < N)[:, None] & in_row[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + rows[:, None] * residual_stride + columns[None, :], mask, other=0.0).to(tl.float32)
        stream = x.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows[:, None] * C + columns[None, :], stream, mask)
        x = stream.to(tl.float32)  # normalise the rounded sum, because the backward starts from the rounded sum
    centred = x
    if CENTRED:
        mean = tl.sum(x, 1) / C
        centred = tl.where(in_row[None, :], x - mean[:, None], 0.0)
        tl.store(mean_ptr + rows, mean, rows < N)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    tl.store(rstd_ptr + rows, rstd, rows < N)
    return centred, rstd


def empty_stream(x: Tensor, residual: Tensor | None, centred: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the new stream, mean and rstd. Without `centred`, mean is empty."""
    stream = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    rows = x.shape[0]  # len(x) would make torch.compile a graph for each number of rows
    mean, rstd = (x.new_empty(length, dtype=torch.float32) for length in (rows if centred else 0, rows))
    return stream, mean, rstd
