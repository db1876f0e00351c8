"""Parts of the decoder's kernels: rows of activations, tiles of weights, and the epilogue of a product.

A product is y = x W^T, where x is (N, K) and W is (OUT, K). Pointers that are None switch a part off.
"""

import triton
import triton.language as tl

from kernels.mlp._gelu import gelu_over_h

EPS = tl.constexpr(1e-5)  # of LayerNorm
FP8_LARGEST = tl.constexpr(448.0)


@triton.jit
def launch_next_kernel(PDL: tl.constexpr):
    """Let the next kernel start when all programs of this kernel have called this (programmatic dependent launch).

    The programs of the next kernel load their weights, and then wait for the results of this kernel.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier_kernels(PDL: tl.constexpr):
    """Return when all earlier kernels are complete.

    Before this call, a kernel writes nothing, and reads only memory that no kernel of the step writes.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Load the line of 128 bytes that holds each pointer into the L2 cache. All pointers must be valid."""
    address = pointers.to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1)


@triton.jit
def prefetch_keys(k_ptr, v_ptr, first, last, D: tl.constexpr, KV_WIDTH: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Prefetch the keys and values first <= n < last of a head."""
    LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    for n in range(first, last, BLOCK_KEYS):
        rows = tl.minimum(n + tl.arange(0, BLOCK_KEYS), last - 1).to(tl.int64) * KV_WIDTH
        for line in tl.static_range(0, D, LINE):
            prefetch(k_ptr + rows + line)
            prefetch(v_ptr + rows + line)


@triton.jit
def zero_counts(count_ptr, COUNTS: tl.constexpr):
    """Zero attention's COUNTS counts of splits. Program 0 of the first kernel of a step calls this."""
    if count_ptr is not None and tl.program_id(0) == 0:
        for start in tl.static_range(0, COUNTS, 1024):
            n = start + tl.arange(0, 1024)
            tl.store(count_ptr + n, tl.zeros((1024,), tl.int32), n < COUNTS)


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
def load_weights(
    weight_ptr, n, step, OUT, K: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, dtype: tl.constexpr
):
    """Return BLOCK_K columns of rows n of W, from step * BLOCK_K on: (SLICES, BLOCK_K / SLICES, BLOCK_N) in `dtype`."""
    WIDTH: tl.constexpr = BLOCK_K // SLICES
    k = step * BLOCK_K + tl.arange(0, SLICES)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    offsets = n.to(tl.int64)[None, :, None] * K + k
    tile = tl.load(weight_ptr + offsets, (n < OUT)[None, :, None] & (k < K), other=0)
    return tl.trans(tile.to(dtype), 0, 2, 1)


@triton.jit
def load_vector(pointer, index, size, missing: tl.constexpr):
    """Return elements of a vector in fp32: 0 from index `size` on, and `missing` if there is no vector."""
    if pointer is None:
        values = tl.full(index.shape, missing, tl.float32)
    else:
        values = tl.load(pointer + index, index < size, other=0.0).to(tl.float32)
    return values


@triton.jit
def load_packed(pointer, index, size):
    """Return elements of a vector in its own dtype, which takes fewer registers: 0 without it or from `size` on."""
    values = tl.zeros(index.shape, tl.float32)
    if pointer is not None:
        values = tl.load(pointer + index, index < size, other=0.0)
    return values


@triton.jit
def embedding_tile(wte_ptr, wpe_ptr, tokens_ptr, positions_ptr, row, k, mask, N, T, wpe_rows, K: tl.constexpr):
    """Return token + position embeddings in fp32. Row b T + t is token t of sequence b."""
    token = tl.load(tokens_ptr + row, row < N, other=0)
    x = tl.load(wte_ptr + token * K + k, mask, other=0.0).to(tl.float32)
    if wpe_ptr is not None:
        position = tl.load(positions_ptr + row // T, row < N, other=0) + row % T
        x += tl.load(wpe_ptr + tl.minimum(position, wpe_rows - 1) * K + k, mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def sum_of_parts(x_ptr, bias_ptr, row, k, mask, N, K: tl.constexpr, PARTS: tl.constexpr):
    """Return the bias plus the PARTS partial sums of a product, (PARTS, N, K) fp32, in fp32."""
    total = tl.load(x_ptr + row * K + k, mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x_ptr + (part * N + row) * K + k, mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + k, k < K, other=0.0).to(tl.float32)
    return total


@triton.jit
def load_stream(
    x_ptr,  # (N, K) the output of the last branch; (PARTS, N, K) fp32 if PARTS > 0; wte (V, K) if tokens_ptr is given
    x_bias_ptr,  # (K,) the bias of the last branch if PARTS > 0
    residual_ptr,  # (N, K) the stream before that branch; None with tokens_ptr
    stream_ptr,  # (N, K) the new stream; a program stores it if `is_writer`
    tokens_ptr,
    wpe_ptr,
    positions_ptr,
    row,  # (ROWS, 1) int64
    is_writer,
    N,
    T,
    wpe_rows,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    dtype: tl.constexpr,  # of the branch
):
    """Return the rows `row` of the new residual stream: a tuple of tiles (ROWS, BLOCK_K) in the stream's dtype."""
    tiles = ()
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        mask = (row < N) & (k < K)
        if tokens_ptr is not None:
            x = embedding_tile(x_ptr, wpe_ptr, tokens_ptr, positions_ptr, row, k, mask, N, T, wpe_rows, K)
        else:
            if PARTS > 0:
                x = sum_of_parts(x_ptr, x_bias_ptr, row, k, mask, N, K, PARTS).to(dtype)
            else:
                x = tl.load(x_ptr + row * K + k, mask, other=0.0)
            x = tl.load(residual_ptr + row * K + k, mask, other=0.0).to(tl.float32) + x.to(tl.float32)
        stream = x.to(stream_ptr.dtype.element_ty)
        if is_writer:
            tl.store(stream_ptr + row * K + k, stream, mask)
        tiles += (stream,)
    return tiles


@triton.jit
def normalise(tiles, gains, shifts, K: tl.constexpr, BLOCK_K: tl.constexpr, dtype: tl.constexpr):
    """Return the LayerNorm of rows in `dtype`. Rows and result are tuples of tiles (ROWS, BLOCK_K), 0 from K on."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    total = tiles[0].to(tl.float32)
    for step in tl.static_range(1, STEPS):
        total += tiles[step].to(tl.float32)
    mean = (tl.sum(total, 1) / K)[:, None]
    squares = tl.zeros(total.shape, tl.float32)
    for step in tl.static_range(STEPS):
        in_row = step * BLOCK_K + tl.arange(0, BLOCK_K) < K
        centred = tl.where(in_row[None, :], tiles[step].to(tl.float32) - mean, 0.0)
        squares += centred * centred
    rstd = (1.0 / tl.sqrt(tl.sum(squares, 1) / K + EPS))[:, None]
    out = ()
    for step in tl.static_range(STEPS):
        y = (tiles[step].to(tl.float32) - mean) * rstd
        y = y * gains[step].to(tl.float32)[None, :] + shifts[step].to(tl.float32)[None, :]
        out += (y.to(dtype),)
    return out


@triton.jit
def cache_places(row, positions_ptr, N, T, cache_rows):
    """Return where the keys of tokens `row` go, int64: rows of a cache that is viewed as (B cache_rows, Hkv D)."""
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
def store_to_cache(cache_ptr, y, place, n, mask, KV_WIDTH: tl.constexpr):
    """Store the columns 0 <= n < KV_WIDTH of y in rows `place` of a cache.

    fp8 clamps, because e4m3 has no infinity. NaN stays NaN.
    """
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        y = tl.clamp(y.to(tl.float32), -FP8_LARGEST, FP8_LARGEST, propagate_nan=tl.PropagateNan.ALL)
    inside = (n >= 0) & (n < KV_WIDTH)
    tl.store(cache_ptr + place[:, None] * KV_WIDTH + n[None, :], y.to(dtype), mask[:, None] & inside[None, :])


@triton.jit
def store_result(
    total,  # (M, BLOCK_N) fp32: rows `row` of x times rows n of W
    row,  # (M,) int64
    n,  # (BLOCK_N,)
    scale,  # (BLOCK_N,) fp32
    bias,  # (BLOCK_N,) fp32
    place,  # (M,) cache_places() of these rows
    out_ptr,
    rope_ptr,
    k_ptr,
    v_ptr,
    N,
    OUT: tl.constexpr,
    GELU: tl.constexpr,
    Q_WIDTH: tl.constexpr,  # H D
    KV_WIDTH: tl.constexpr,  # Hkv D
    D: tl.constexpr,
):
    """Store total * scale + bias into out (N, OUT). With k_ptr: queries into out, keys and values into the cache."""
    y = (total * scale[None, :] + bias[None, :]).to(out_ptr.dtype.element_ty)
    if GELU:
        h = y.to(tl.float32)
        y = (h * gelu_over_h(h)).to(y.dtype)
    in_rows = row < N
    if k_ptr is None:
        tl.store(out_ptr + row[:, None] * OUT + n[None, :], y, in_rows[:, None] & (n < OUT)[None, :])
    else:
        if rope_ptr is not None:
            y = rotate_pairs(y, rope_ptr, row, n, N, Q_WIDTH + KV_WIDTH, D)
        tl.store(out_ptr + row[:, None] * Q_WIDTH + n[None, :], y, in_rows[:, None] & (n < Q_WIDTH)[None, :])
        store_to_cache(k_ptr, y, place, n - Q_WIDTH, in_rows, KV_WIDTH)
        store_to_cache(v_ptr, y, place, n - Q_WIDTH - KV_WIDTH, in_rows, KV_WIDTH)
