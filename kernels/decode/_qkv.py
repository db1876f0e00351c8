"""The parts of the kernels that only qkv needs: rotary positions, rows of the cache, the norm of queries and keys."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.decode._pairs import split_pairs
from kernels.decode._step import NOT_SPECIALISED, Step
from kernels.decode._tiles import launch_next_kernel, store_rows, wait_for_earlier_kernels
from kernels.decode._weights import Layer

FP8_LARGEST = tl.constexpr(448.0)


@triton.jit
def rows_in_cache(row, positions_ptr, N, T, cache_rows):
    """Return the rows in which the keys of tokens `row` are stored, int64. The cache is (B cache_rows, Hkv D)."""
    b = row // T
    position = tl.load(positions_ptr + b, row < N, other=0) + row % T
    return b * cache_rows + position % cache_rows


@triton.jit
def rotate_pairs(y, rope_ptr, row, n, N, ROTATED: tl.constexpr, D: tl.constexpr):
    """Rotate each pair of channels of y (M, BLOCK_N), whose columns are weight_rows(PAIRS=True). See kernels/rope.

    rope_ptr is (2, N, D/2) fp32. Rows of W from ROTATED on belong to values, which do not rotate.
    """
    M: tl.constexpr = y.shape[0]
    HALF: tl.constexpr = y.shape[1] // 2
    a, b, channel = split_pairs(y, n)
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
    q_ptr,  # (N, H D); without k_ptr (N, (H + Hkv) D)
    k_ptr,  # None if _qk_norm_kernel follows
    v_ptr,
    rope_ptr,
    N,
    Q_WIDTH: tl.constexpr,  # H D
    KV_WIDTH: tl.constexpr,  # Hkv D
    D: tl.constexpr,
):
    """Rotate queries and keys if rope_ptr is given. Store the queries in q, and keys and values in the cache.

    Without k_ptr, q gets the keys too.
    """
    if rope_ptr is not None:
        y = rotate_pairs(y, rope_ptr, row, n, N, Q_WIDTH + KV_WIDTH, D)
    in_rows = row < N
    if k_ptr is None:
        store_rows(q_ptr, y, row, n, N, Q_WIDTH + KV_WIDTH)
    else:
        store_rows(q_ptr, y, row, n, N, Q_WIDTH)
        store_to_cache(k_ptr, y, cache_row, n - Q_WIDTH, in_rows, KV_WIDTH)
    store_to_cache(v_ptr, y, cache_row, n - Q_WIDTH - KV_WIDTH, in_rows, KV_WIDTH)


@triton.jit
def _load_gain(q_weight_ptr, k_weight_ptr, i, mask, head, HEADS: tl.constexpr):
    """Return elements i of the weight of the norm of queries, or from head HEADS on of keys, in fp32."""
    q_weight = tl.load(q_weight_ptr + i, mask & (head < HEADS), other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + i, mask & (head >= HEADS), other=0.0).to(tl.float32)
    return q_weight + k_weight


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _qk_norm_kernel(
    x_ptr,  # (N, (H + Hkv) D): queries and keys
    q_weight_ptr,  # (D,)
    k_weight_ptr,
    rope_ptr,  # (2, N, D/2) fp32
    q_ptr,  # (N, H D)
    k_ptr,  # (B, cache_rows, Hkv, D)
    positions_ptr,  # (B,) int64: of token 0 of each sequence
    N,
    T,
    cache_rows,
    D: tl.constexpr,
    Q_WIDTH: tl.constexpr,  # H D
    KV_WIDTH: tl.constexpr,  # Hkv D
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,  # D/2 or more
    PDL: tl.constexpr,
):
    """RMSNorm of a query or a key, then its rotation: one head of a row in each program.

    The sum of squares needs a whole head, and a program of qkv has only 8 to 32 of its 64 to 256 channels.
    """
    launch_next_kernel(PDL)
    HALF: tl.constexpr = D // 2
    HEADS: tl.constexpr = Q_WIDTH // D
    row, head = tl.program_id(0).to(tl.int64) + tl.zeros((1,), tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    gain_a = _load_gain(q_weight_ptr, k_weight_ptr, i, inside, head, HEADS)
    gain_b = _load_gain(q_weight_ptr, k_weight_ptr, HALF + i, inside, head, HEADS)
    turn = row * HALF + i
    cos = tl.load(rope_ptr + turn, inside, other=1.0)
    sin = tl.load(rope_ptr + tl.cast(N, tl.int64) * HALF + turn, inside, other=0.0)
    cache_row = rows_in_cache(row, positions_ptr, N, T, cache_rows)
    wait_for_earlier_kernels(PDL)
    x_ptr += row * (Q_WIDTH + KV_WIDTH) + head * D + i
    a = tl.load(x_ptr, inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + HALF, inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(a * a + b * b, 0) / D + EPS)
    a, b = a * rstd * gain_a, b * rstd * gain_b
    n = tl.where(inside, head * D + i, Q_WIDTH + KV_WIDTH)  # no array has the last column
    for half in tl.static_range(2):
        y = a * cos - b * sin if half == 0 else b * cos + a * sin
        y, column = y.to(q_ptr.dtype.element_ty)[None, :], n + half * HALF
        store_rows(q_ptr, y, row, column, N, Q_WIDTH)
        store_to_cache(k_ptr, y, cache_row, column - Q_WIDTH, row < N, KV_WIDTH)


def norm_and_rotate(step: Step, x: Tensor, layer: Layer, k: Tensor) -> Tensor:
    """Normalise and rotate x (N, (H + Hkv) D). Return the queries (N, H D), and store the keys in the cache."""
    D, Q_WIDTH = step.shared["D"], step.shared["Q_WIDTH"]
    q = step.empty(step.N, Q_WIDTH)
    step.launch(
        _qk_norm_kernel,
        (step.N, x.shape[1] // D),
        x_ptr=x,
        q_weight_ptr=layer.q_norm_weight,
        k_weight_ptr=layer.k_norm_weight,
        rope_ptr=step.rope,
        q_ptr=q,
        k_ptr=k,
        BLOCK=triton.next_power_of_2(D // 2),
        num_warps=1,
    )
    return q
