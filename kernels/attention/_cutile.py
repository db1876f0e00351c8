"""The kernels of cutile.py. Importing this file imports cuda.tile, which reads the source of these functions.

q, k, v, out and their gradients are (B, T, H, channels), and lse and delta (B, H, Tq) fp32. `window` is Tk without a
window. A tile has M queries or N keys, and D channels. Blocks are numbered (tile, head, sequence). A tile beyond the
edge of a tensor is filled with zeros, and its part beyond the edge is not stored.
"""

import math

import cuda.tile as ct

ZERO = ct.PaddingMode.ZERO
LOG2E = math.log2(math.e)  # exp(x) = exp2(LOG2E x); the hardware has only exp2
LOWEST = -1e30  # below every score, but finite, because -inf - -inf would be NaN
Flag, Size = ct.Constant[bool], ct.Constant[int]


def load(x: ct.Array, b: int, i: int, h: int, SIZE: int, D: int) -> ct.Tile:
    """Return rows SIZE i, SIZE i + 1, ... of x for head h of sequence b (SIZE, D)."""
    return ct.load(x, (b, i, h, 0), (1, SIZE, 1, D), padding_mode=ZERO).reshape((SIZE, D))


def load_numbers(x: ct.Array, b: int, h: int, i: int, SIZE: int) -> ct.Tile:
    """Return lse or delta of SIZE queries (SIZE,)."""
    return ct.load(x, (b, h, i), (1, 1, SIZE), padding_mode=ZERO).reshape((SIZE,))


def product(a: ct.Tile, b: ct.Tile) -> ct.Tile:
    """Return a b^T in fp32. The matmul reads b as it lies in shared memory, so the transpose costs nothing."""
    return ct.mma(a, ct.transpose(b), ct.zeros((a.shape[0], b.shape[0]), dtype=ct.float32))


def hide(s: ct.Tile, query: ct.Tile, key: ct.Tile, Tq: int, Tk: int, window: int, CAUSAL: bool) -> ct.Tile:
    """Return the scores s, with -inf where the query does not see the key."""
    if CAUSAL:
        # At most Tk: rows beyond the last query see a key, too, and are not NaN
        end = ct.minimum(query + (Tk - Tq + 1), Tk)
        visible = (key < end) & (key >= end - window)
    else:
        visible = key < Tk
    return ct.where(visible, s, -math.inf)


def visible_keys(m: int, M: int, Tq: int, Tk: int, window: int, CAUSAL: bool) -> tuple[int, int, int, int]:
    """Return any_start, all_start, all_end, any_end of the M queries m, m + 1, ...

    No query sees a key before any_start or from any_end on. All see the keys from all_start to before all_end.
    """
    all_end, any_end = Tk, Tk
    if CAUSAL:
        all_end, any_end = m + Tk - Tq + 1, min(m + M, Tq) + Tk - Tq
    return max(all_end - window, 0), any_end - window, all_end, any_end


# Eight warps compute, so a thread has 64 of the scores of a tile of 128 x 128. Others load
@ct.kernel(num_worker_warps=8)
def cutile_attention_fwd(q, k, v, out, lse, scale: float, window: int, M: Size, N: Size, D: Size, CAUSAL: Flag):
    i, h, b = ct.num_blocks(0) - 1 - ct.bid(0), ct.bid(1), ct.bid(2)  # a head's block with the most keys starts first
    Tq, Tk, kv_head = q.shape[1], k.shape[1], h // (q.shape[2] // k.shape[2])
    any_start, all_start, all_end, any_end = visible_keys(i * M, M, Tq, Tk, window, CAUSAL)
    query, key = ct.arange(M, dtype=ct.int32).reshape((M, 1)) + i * M, ct.arange(N, dtype=ct.int32).reshape((1, N))
    largest = ct.full((M, 1), LOWEST, dtype=ct.float32)  # m of triton.py, times log2(e)
    total = ct.zeros((M, 1), dtype=ct.float32)  # l of triton.py
    acc = ct.zeros((M, D), dtype=ct.float32)
    q_tile = load(q, b, i, h, M, D)
    for j in range(any_start // N, ct.cdiv(any_end, N)):
        s = product(q_tile, load(k, b, j, kv_head, N, D))
        if j * N < all_start or j * N + N > all_end:
            s = hide(s, query, key + j * N, Tq, Tk, window, CAUSAL)
        before = largest
        largest = ct.maximum(before, ct.max(s, 1, keepdims=True) * (scale * LOG2E))
        p = ct.exp2(s * (scale * LOG2E) - largest, flush_to_zero=True)
        shrink = ct.exp2(before - largest, flush_to_zero=True)
        total = total * shrink + ct.sum(p, 1, keepdims=True)
        acc = ct.mma(p.astype(v.dtype), load(v, b, j, kv_head, N, D), acc * shrink)
    ct.store(out, (b, i, h, 0), (acc * (1.0 / total)).astype(out.dtype).reshape((1, M, 1, D)))
    ct.store(lse, (b, h, i), (largest + ct.log2(total)).reshape((1, 1, M)))


@ct.kernel(num_worker_warps=8)
def cutile_attention_dq(
    q, k, v, out, dout, lse, delta, dq, scale: float, window: int, M: Size, N: Size, D: Size, CAUSAL: Flag
):
    """Write dq, and delta, each query's sum of dout out."""
    i, h, b = ct.num_blocks(0) - 1 - ct.bid(0), ct.bid(1), ct.bid(2)
    Tq, Tk, kv_head = q.shape[1], k.shape[1], h // (q.shape[2] // k.shape[2])
    any_start, all_start, all_end, any_end = visible_keys(i * M, M, Tq, Tk, window, CAUSAL)
    query, key = ct.arange(M, dtype=ct.int32).reshape((M, 1)) + i * M, ct.arange(N, dtype=ct.int32).reshape((1, N))
    q_tile, dout_tile = load(q, b, i, h, M, D), load(dout, b, i, h, M, D)
    out_tile = load(out, b, i, h, M, D).astype(ct.float32)
    row_lse = load_numbers(lse, b, h, i, M).reshape((M, 1))
    row_delta = ct.sum(dout_tile.astype(ct.float32) * out_tile, 1, keepdims=True)
    ct.store(delta, (b, h, i), row_delta.reshape((1, 1, M)))
    total = ct.zeros((M, D), dtype=ct.float32)
    for j in range(any_start // N, ct.cdiv(any_end, N)):
        k_tile = load(k, b, j, kv_head, N, D)
        s = product(q_tile, k_tile)
        if j * N < all_start or j * N + N > all_end:
            s = hide(s, query, key + j * N, Tq, Tk, window, CAUSAL)
        p = ct.exp2(s * (scale * LOG2E) - row_lse, flush_to_zero=True)
        ds = p * (product(dout_tile, load(v, b, j, kv_head, N, D)) - row_delta)
        total = ct.mma(ds.astype(k.dtype), k_tile, total)
    ct.store(dq, (b, i, h, 0), (total * scale).astype(dq.dtype).reshape((1, M, 1, D)))


@ct.kernel(num_worker_warps=8)
def cutile_attention_dkdv(
    q, k, v, dout, lse, delta, dk, dv, scale: float, window: int, M: Size, N: Size, D: Size, CAUSAL: Flag
):
    """Write dk and dv. s, p and ds have a row for each key: p and ds are first factors, and stay in registers."""
    j, kv_head, b = ct.bid(0), ct.bid(1), ct.bid(2)
    Tq, Tk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    # No query before any_start or from any_end on sees a key of the tile. The queries from all_start to before all_end
    # see all of them. Without CAUSAL no tile needs a mask, because rows of keys beyond Tk are not stored
    any_start, all_start, all_end, any_end = 0, 0, Tq + M, Tq
    if CAUSAL:
        first = j * N + Tq - Tk  # of the queries that see key j N
        any_start, all_start = max(first, 0), first + N - 1
        all_end, any_end = first + window, min(first + N - 1 + window, Tq)
    query, key = ct.arange(M, dtype=ct.int32).reshape((1, M)), ct.arange(N, dtype=ct.int32).reshape((N, 1)) + j * N
    k_tile, v_tile = load(k, b, j, kv_head, N, D), load(v, b, j, kv_head, N, D)
    total_k, total_v = ct.zeros((N, D), dtype=ct.float32), ct.zeros((N, D), dtype=ct.float32)
    for h in range(kv_head * group, kv_head * group + group):  # the query heads that share these keys
        for i in range(any_start // M, ct.cdiv(any_end, M)):
            q_tile, dout_tile = load(q, b, i, h, M, D), load(dout, b, i, h, M, D)
            s = product(k_tile, q_tile)
            if i * M < all_start or i * M + M > all_end:
                s = hide(s, query + i * M, key, Tq, Tk, window, CAUSAL)
            p = ct.exp2(s * (scale * LOG2E) - load_numbers(lse, b, h, i, M).reshape((1, M)), flush_to_zero=True)
            total_v = ct.mma(p.astype(dout.dtype), dout_tile, total_v)
            ds = p * (product(v_tile, dout_tile) - load_numbers(delta, b, h, i, M).reshape((1, M)))
            total_k = ct.mma(ds.astype(q.dtype), q_tile, total_k)
    ct.store(dk, (b, j, kv_head, 0), (total_k * scale).astype(dk.dtype).reshape((1, N, 1, D)))
    ct.store(dv, (b, j, kv_head, 0), total_v.astype(dv.dtype).reshape((1, N, 1, D)))
