"""The core of the norm's forward kernels in triton.py and _fp8.py: add, then subtract the mean and compute rstd."""

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
    mean = tl.sum(x, 1) / C
    centred = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    tl.store(mean_ptr + rows, mean, rows < N)
    tl.store(rstd_ptr + rows, rstd, rows < N)
    return centred, rstd


def empty_stream(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the new stream, mean and rstd."""
    stream = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return stream, mean, rstd
