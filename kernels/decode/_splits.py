"""The results of several splits of the keys: both kernels of attention combine them in the same way."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # below every score, but finite, because -inf - -inf would be NaN


@triton.jit
def merge(largest, total, acc, lse, out):
    """Add the result `out` of one split, with its lse, to the sums of the online softmax."""
    before = largest
    largest = tl.maximum(before, lse)
    shrink, weight = tl.exp2(before - largest), tl.exp2(lse - largest)
    return largest, total * shrink + weight, acc * shrink[:, None] + out * weight[:, None]


@triton.jit
def combine_splits(
    part_ptr, lse_ptr, row, real, d, active, N, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr
):
    """Return the combined results of the active splits for the rows `row` of (N H, D) that are `real`, in fp32."""
    ROWS: tl.constexpr = row.shape[0]
    largest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, d.shape[0]), tl.float32)
    for i in tl.static_range(SPLITS):
        part = tl.cast(N, tl.int64) * i * HEADS
        done = real & (i < active)
        lse = tl.load(lse_ptr + part + row, done, other=LOWEST)
        offsets = row[:, None] * D + d[None, :]
        out = tl.load(part_ptr + part * D + offsets, done[:, None] & (d < D)[None, :], other=0.0)
        largest, total, acc = merge(largest, total, acc, lse, out)
    return acc / total[:, None]


@triton.jit
def combine_splits_of_row(
    part_ptr, lse_ptr, row, d, in_head, active, N, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr
):
    """Return what combine_splits() returns, for one row: (1, BLOCK_D).

    With combine_splits() the whole kernel compiles differently (for a cache in fp8 to 128 registers instead of 159),
    and nobody has timed that.
    """
    largest = tl.full((1,), LOWEST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, d.shape[0]), tl.float32)
    for i in tl.static_range(SPLITS):
        done = tl.full((1,), i, tl.int32) < active
        part = tl.cast(N, tl.int64) * i * HEADS + row + tl.zeros((1,), tl.int64)
        lse = tl.load(lse_ptr + part, done, other=LOWEST)
        out = tl.load(part_ptr + part[:, None] * D + d[None, :], done[:, None] & in_head, other=0.0)
        largest, total, acc = merge(largest, total, acc, lse, out)
    return acc / total[:, None]


@triton.jit
def is_last_split(count_ptr, active):
    """Return, after all threads have stored the result of a split, whether the other active splits are done too."""
    tl.debug_barrier()
    is_last = tl.atomic_add(count_ptr, 1, sem="acq_rel") == active - 1
    if is_last:
        tl.store(count_ptr, 0)
    return is_last
