"""The sum of a matrix's rows in cuTile. Importing this file imports cuda.tile, which reads the source of the kernel."""

import cuda.tile as ct
import torch
import triton
from torch import Tensor

from kernels.cutile import launch
from kernels.gpu import multiprocessors

ROWS, COLUMNS = 64, 128  # of a tile: two cache lines of each row in bf16
PARTIAL_ROWS = 256  # of a tile of partial sums. It has few columns, so that many blocks run
PROGRAMS = 4  # for each multiprocessor


@ct.kernel(occupancy=4)
def cutile_sum_rows(x, out, ROWS: ct.Constant[int], COLUMNS: ct.Constant[int]):
    """Write sums of the rows of x (N, C) to out (P, C), where P is the number of programs.

    Block (c, p) adds tiles p, p + P, p + 2P, ... of its columns.
    """
    column, part = ct.bid(0), ct.bid(1)
    total = ct.zeros((ROWS, COLUMNS), dtype=ct.float32)
    for row in range(part, ct.num_tiles(x, 0, (ROWS, COLUMNS)), ct.num_blocks(1)):
        total += ct.load(x, (row, column), (ROWS, COLUMNS), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(out, (part, column), ct.sum(total, 0, keepdims=True).astype(out.dtype))


def add_partial_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the rows of `partial` (N, C) fp32, contiguous: (C,) in `dtype`."""
    N, C = partial.shape
    rows = min(PARTIAL_ROWS, triton.next_power_of_2(N))
    columns = min(1024, ROWS * COLUMNS // rows)
    out = torch.empty(1, C, dtype=dtype, device=partial.device)
    launch(cutile_sum_rows, (triton.cdiv(C, columns), 1), x=partial, out=out, ROWS=rows, COLUMNS=columns)
    return out[0]


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of the rows of x (N, C), contiguous: (C,) in x's dtype, summed in fp32."""
    N, C = x.shape
    blocks = triton.cdiv(C, COLUMNS)
    programs = max(1, min(triton.cdiv(N, ROWS), PROGRAMS * multiprocessors(x.device) // blocks))
    partial = torch.empty(programs, C, dtype=torch.float32, device=x.device)
    launch(cutile_sum_rows, (blocks, programs), x=x, out=partial, ROWS=ROWS, COLUMNS=COLUMNS)
    return add_partial_sums(partial, x.dtype)
