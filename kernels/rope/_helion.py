"""The kernel of helion.py. Importing this file imports Helion, which reads the source of this function."""

import functools
from collections.abc import Callable

import helion
import helion.language as hl
import torch


def rope(x, table, out, turned, sign):
    """Write out (N, heads, 2, D/2), like x, with the first `turned` heads rotated by sign times the angles of `table`.

    The table (2, rows, D/2) has the cosines and sines of N tokens, or of T: they are then for each sequence.
    """
    hl.specialize(x.size(3))
    rows = table.size(1)
    for tokens, heads in hl.tile([x.size(0), x.size(1)]):
        row = tokens.index % rows
        cos, sin = table[0, row, :][:, None, :], table[1, row, :][:, None, :] * sign
        left, right = x[tokens, heads, 0, :], x[tokens, heads, 1, :]
        a, b = left.to(torch.float32), right.to(torch.float32)
        turns = (heads.index < turned)[None, :, None]
        out[tokens, heads, 0, :] = torch.where(turns, (a * cos - b * sin).to(out.dtype), left)
        out[tokens, heads, 1, :] = torch.where(turns, (b * cos + a * sin).to(out.dtype), right)


@functools.cache
def kernel(block_sizes: tuple[int, int], num_warps: int) -> Callable:
    """Return the Helion kernel. A config is given, so Helion does not tune it."""
    config = helion.Config(block_sizes=list(block_sizes), num_warps=num_warps)
    return helion.kernel(rope, config=config, static_shapes=False)
