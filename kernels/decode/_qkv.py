"""The parts of the kernels that only qkv needs: pairs of rows of W, rotary positions, and rows of the cache."""

import triton
import triton.language as tl

from kernels.decode._tiles import store_rows

FP8_LARGEST = tl.constexpr(448.0)


@triton.jit
def weight_rows(tile, BLOCK_N: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr):
    """Return the rows of W in tile number `tile`, (BLOCK_N,).

    PAIRS is for rotary positions: where the first half of the tile has channel i, the second half has i + D/2.
    """
    i = tl.arange(0, BLOCK_N)
    if PAIRS:
        pair = tile * (BLOCK_N // 2) + i % (BLOCK_N // 2)
        n = pair // (D // 2) * D + pair % (D // 2) + i // (BLOCK_N // 2) * (D // 2)
    else:
        n = tile * BLOCK_N + i
    return n


@triton.jit
def rows_in_cache(row, positions_ptr, N, T, cache_rows):
    """Return the rows in which the keys of tokens `row` are stored, int64. The cache is (B cache_rows, Hkv D)."""
    b = row // T
    position = tl.load(positions_ptr + b, row < N, other=0) + row % T
    return b * cache_rows + position % cache_rows


@triton.jit
def rotate_pairs(y, rope_ptr, row, n, N, ROTATED: tl.constexpr, D: tl.constexpr):
    """Rotate each pair of channels of y (M, BLOCK_N), whose columns are weight_rows(PAIRS=True). See kernels/rope.py.

    rope_ptr is (2, N, D/2) fp32. Rows of W from ROTATED on belong to values, which do not rotate.
    """
    M: tl.constexpr = y.shape[0]
    HALF: tl.constexpr = y.shape[1] // 2
    a, b = tl.split(tl.permute(tl.reshape(y.to(tl.float32), (M, 2, HALF)), (0, 2, 1)))
    channel, _ = tl.split(tl.permute(tl.reshape(n, (2, HALF)), (1, 0)))
    offsets = row[:, None] * (D // 2) + (channel % D)[None, :]
    mask = (row < N)[:, None] & (channel < ROTATED)[None, :]
    cos = tl.load(rope_ptr + offsets, mask, other=1.0)
    sin = tl.load(rope_ptr + tl.cast(N, tl.int64) * (D // 2) + offsets, mask, other=0.0)
    rotated = tl.join(a * cos - b * sin, b * cos + a * sin)  # (M, HALF, 2)
    return tl.reshape(tl.permute(rotated, (0, 2, 1)), (M, 2 * HALF)).to(y.dtype)


@triton.jit
def store_to_cache(cache_ptr, y, cache_row, n, mask, KV_WIDTH: tl.constexpr):
    """Store the columns 0 <= n < KV_WIDTH of y in rows `cache_row` (M,) of a cache.

    fp8 clamps, because e4m3 has no infinity. NaN stays NaN.
    """
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        y = tl.clamp(y.to(tl.float32), -FP8_LARGEST, FP8_LARGEST, propagate_nan=tl.PropagateNan.ALL)
    inside = (n >= 0) & (n < KV_WIDTH)
    tl.store(cache_ptr + cache_row[:, None] * KV_WIDTH + n[None, :], y.to(dtype), mask[:, None] & inside[None, :])


@triton.jit
def store_qkv(
    y,  # (M, BLOCK_N): columns n of the result of qkv, weight_rows(PAIRS=True) with rope_ptr
    row,  # (M,) int64
    n,  # (BLOCK_N,)
    cache_row,  # (M,) rows_in_cache() of these rows
    q_ptr,  # (N, H D)
    k_ptr,
    v_ptr,
    rope_ptr,
    N,
    Q_WIDTH: tl.constexpr,  # H D
    KV_WIDTH: tl.constexpr,  # Hkv D
    D: tl.constexpr,
):
    """Rotate queries and keys if rope_ptr is given. Store the queries in q, and keys and values in the cache."""
    if rope_ptr is not None:
        y = rotate_pairs(y, rope_ptr, row, n, N, Q_WIDTH + KV_WIDTH, D)
    in_rows = row < N
    store_rows(q_ptr, y, row, n, N, Q_WIDTH)
    store_to_cache(k_ptr, y, cache_row, n - Q_WIDTH, in_rows, KV_WIDTH)
    store_to_cache(v_ptr, y, cache_row, n - Q_WIDTH - KV_WIDTH, in_rows, KV_WIDTH)
