"""Parts of the decoder's kernels, in the order in which a kernel calls them.

A product is y = x W^T, where x is (N, K) and W is (OUT, K). A tuple of tiles has one tile for BLOCK_K columns of K.
Pointers that are None switch a part off.
"""

import triton
import triton.language as tl

from kernels.decode._pairs import split_pairs
from kernels.mlp._activations import activate, sigmoid


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
def load_weights(
    weight_ptr,  # (OUT, K)
    ln_weight_ptr,  # (K,), or None for a product without a norm
    ln_bias_ptr,
    n,  # (BLOCK_N,)
    OUT,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return rows n of W in `dtype`, and the norm's weight and bias: three tuples of tiles.

    Their shapes are (SLICES, BLOCK_K / SLICES, BLOCK_N), (BLOCK_K,) and (BLOCK_K,).
    """
    WIDTH: tl.constexpr = BLOCK_K // SLICES
    weights, gains, shifts = (), (), ()
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, SLICES)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        offsets = n.to(tl.int64)[None, :, None] * K + k
        tile = tl.load(weight_ptr + offsets, (n < OUT)[None, :, None] & (k < K), other=0)
        weights += (tl.trans(tile.to(dtype), 0, 2, 1),)
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        gains += (load_packed(ln_weight_ptr, k, K),)
        shifts += (load_packed(ln_bias_ptr, k, K),)
    return weights, gains, shifts


@triton.jit
def store_stream(stream_ptr, x, row, k, mask, is_writer, K: tl.constexpr):
    """Return a tile of the new stream in the stream's dtype. If `is_writer`, store it."""
    stream = x.to(stream_ptr.dtype.element_ty)
    if is_writer:
        tl.store(stream_ptr + row * K + k, stream, mask)
    return stream


@triton.jit
def embed(
    wte_ptr,  # (V, K)
    wpe_ptr,  # (wpe_rows, K) or None
    tokens_ptr,  # (N,) int64: row b T + t is token t of sequence b
    positions_ptr,  # (B,) int64: of token 0 of each sequence
    stream_ptr,  # (N, K): a program stores it if `is_writer`
    row,  # (ROWS, 1) int64
    is_writer,
    N,
    T,
    wpe_rows,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return rows of token + position embeddings, which begin the stream: a tuple of tiles (ROWS, BLOCK_K)."""
    tiles = ()
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        mask = (row < N) & (k < K)
        token = tl.load(tokens_ptr + row, row < N, other=0)
        x = tl.load(wte_ptr + token * K + k, mask, other=0.0).to(tl.float32)
        if wpe_ptr is not None:
            position = tl.load(positions_ptr + row // T, row < N, other=0) + row % T
            x += tl.load(wpe_ptr + tl.minimum(position, wpe_rows - 1) * K + k, mask, other=0.0).to(tl.float32)
        tiles += (store_stream(stream_ptr, x, row, k, mask, is_writer, K),)
    return tiles


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
def add_branch(
    x_ptr,  # (N, K) the output of the branch; (PARTS, N, K) fp32 if PARTS > 0
    residual_ptr,  # (N, K) the stream before the branch
    stream_ptr,  # (N, K) the new stream: a program stores it if `is_writer`
    row,  # (ROWS, 1) int64
    is_writer,
    N,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    x_bias_ptr=None,  # (K,) the bias of the branch if PARTS > 0
    PARTS: tl.constexpr = 0,
    dtype: tl.constexpr = None,  # of the branch if PARTS > 0
):
    """Return rows of the residual stream plus a branch: a tuple of tiles (ROWS, BLOCK_K) in the stream's dtype."""
    tiles = ()
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        mask = (row < N) & (k < K)
        if PARTS > 0:
            x = sum_of_parts(x_ptr, x_bias_ptr, row, k, mask, N, K, PARTS).to(dtype)
        else:
            x = tl.load(x_ptr + row * K + k, mask, other=0.0)
        x = tl.load(residual_ptr + row * K + k, mask, other=0.0).to(tl.float32) + x.to(tl.float32)
        tiles += (store_stream(stream_ptr, x, row, k, mask, is_writer, K),)
    return tiles


@triton.jit
def normalise(
    tiles,
    gains,
    shifts,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,  # False: RMSNorm
    dtype: tl.constexpr,
):
    """Return the norm of rows in `dtype`. Rows and result are tuples of tiles (ROWS, BLOCK_K), 0 from K on."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    if CENTRED:
        total = tiles[0].to(tl.float32)
        for step in tl.static_range(1, STEPS):
            total += tiles[step].to(tl.float32)
        mean = (tl.sum(total, 1) / K)[:, None]
    squares = tl.zeros(tiles[0].shape, tl.float32)
    for step in tl.static_range(STEPS):
        centred = tiles[step].to(tl.float32)
        if CENTRED:
            in_row = step * BLOCK_K + tl.arange(0, BLOCK_K) < K
            centred = tl.where(in_row[None, :], centred - mean, 0.0)
        squares += centred * centred
    rstd = (1.0 / tl.sqrt(tl.sum(squares, 1) / K + EPS))[:, None]
    out = ()
    for step in tl.static_range(STEPS):
        y = tiles[step].to(tl.float32)
        if CENTRED:
            y = y - mean
        y = y * rstd
        y = y * gains[step].to(tl.float32)[None, :] + shifts[step].to(tl.float32)[None, :]
        out += (y.to(dtype),)
    return out


@triton.jit
def multiply_slices(x, weights, sums, PRECISION: tl.constexpr):
    """Add the product of a tile of x (ROWS, BLOCK_K) and a tile of load_weights() to the sums of each slice of K."""
    ROWS: tl.constexpr = x.shape[0]
    SLICES: tl.constexpr = weights.shape[0]
    x = tl.permute(tl.reshape(x, (ROWS, SLICES, weights.shape[1])), (1, 0, 2))
    return tl.dot(x, weights, sums, input_precision=PRECISION)


@triton.jit
def multiply(x, weights, PRECISION: tl.constexpr):
    """Return x W^T, (ROWS, BLOCK_N) fp32. x is a tuple of tiles (ROWS, BLOCK_K), and weights are of load_weights().

    Each warp multiplies its slices of K. Then the slices are added.
    """
    sums = tl.zeros((weights[0].shape[0], x[0].shape[0], weights[0].shape[2]), tl.float32)
    for step in tl.static_range(len(weights)):
        sums = multiply_slices(x[step], weights[step], sums, PRECISION)
    return tl.sum(sums, 0)


@triton.jit
def multiply_rows(x_ptr, row, weights, N, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr):
    """Return multiply() for rows `row` (ROWS,) of x (N, K). A tile is loaded when it is needed, to save registers."""
    sums = tl.zeros((weights[0].shape[0], row.shape[0], weights[0].shape[2]), tl.float32)
    for step in tl.static_range(len(weights)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (row < N)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + row[:, None] * K + k[None, :], mask, other=0.0)
        sums = multiply_slices(x, weights[step], sums, PRECISION)
    return tl.sum(sums, 0)


@triton.jit
def add_bias(total, scale, bias, dtype: tl.constexpr):
    """Return total * scale + bias, (M, BLOCK_N) in `dtype`. total is in fp32, and scale and bias are (BLOCK_N,)."""
    return (total * scale[None, :] + bias[None, :]).to(dtype)


@triton.jit
def store_rows(out_ptr, y, row, n, N, OUT: tl.constexpr):
    """Store y (M, BLOCK_N) in rows `row` and columns n of out (N, OUT)."""
    in_rows = (row < N)[:, None]
    tl.store(out_ptr + row[:, None] * OUT + n[None, :], y, in_rows & (n < OUT)[None, :])


@triton.jit
def store_hidden(out_ptr, y, row, n, N, OUT: tl.constexpr, ACTIVATION: tl.constexpr):
    """Store the activation of y (M, BLOCK_N), columns n of fc's result (N, OUT).

    With swiglu, n are weight_rows(PAIRS=True), and out is (N, OUT / 2).
    """
    if ACTIVATION == "swiglu":
        gate, up, unit = split_pairs(y, n)
        store_rows(out_ptr, (gate * sigmoid(gate) * up).to(y.dtype), row, unit, N, OUT // 2)
    else:
        activated, _ = activate(y.to(tl.float32), ACTIVATION, False)
        store_rows(out_ptr, activated.to(y.dtype), row, n, N, OUT)
