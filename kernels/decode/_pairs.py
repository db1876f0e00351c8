"""Tiles with two rows of W that belong together: both channels of a rotation, or a unit of the gate and of up."""

import triton
import triton.language as tl


@triton.jit
def weight_rows(tile, BLOCK_N: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr):
    """Return the rows of W in tile number `tile`, (BLOCK_N,).

    With PAIRS, W has groups of D rows: where the first half of the tile has row i of a group, the second half has row
    i + D/2. A group is a head, or all rows of swiglu.
    """
    i = tl.arange(0, BLOCK_N)
    if PAIRS:
        pair = tile * (BLOCK_N // 2) + i % (BLOCK_N // 2)
        n = pair // (D // 2) * D + pair % (D // 2) + i // (BLOCK_N // 2) * (D // 2)
    else:
        n = tile * BLOCK_N + i
    return n


@triton.jit
def split_pairs(y, n):
    """Return both halves of y (M, BLOCK_N) in fp32, and n of the first half. n are weight_rows(PAIRS=True)."""
    M: tl.constexpr = y.shape[0]
    HALF: tl.constexpr = y.shape[1] // 2
    a, b = tl.split(tl.permute(tl.reshape(y.to(tl.float32), (M, 2, HALF)), (0, 2, 1)))
    first, _ = tl.split(tl.permute(tl.reshape(n, (2, HALF)), (1, 0)))
    return a, b, first
