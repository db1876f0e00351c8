"""Attention of a few queries of a head with its own key head, without tensor cores: see _attention.py."""

import triton
import triton.language as tl

from kernels.decode._splits import LOWEST, combine_splits_of_row, is_last_split
from kernels.decode._step import NOT_SPECIALISED
from kernels.decode._tiles import launch_next_kernel, prefetch_keys, wait_for_earlier_kernels


@triton.jit
def _load_old_tiles(
    k_ptr,  # the first key of a head, like v_ptr
    v_ptr,
    lanes,  # tl.arange(0, BLOCK_KEYS)
    tile,  # (BLOCK_KEYS, BLOCK_D) offsets
    in_head,  # (1, BLOCK_D)
    first,
    last,
    position,
    T,
    cache_rows,
    Q_WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):
    """Return tiles of keys first <= n < last, of their values, and of their ages: three tuples.

    This step writes the keys of age 0 <= age < T. In the tiles they are zero.
    """
    BLOCK_KEYS: tl.constexpr = lanes.shape[0]
    ks, vs, ages = (), (), ()
    for i in tl.static_range(TILES):
        n = first + i * BLOCK_KEYS
        age = n + lanes - (position % cache_rows).to(tl.int32)
        age = tl.where(age < 0, age + cache_rows, age)
        old = ((n + lanes < last) & (age >= T))[:, None] & in_head
        ks += (tl.load(k_ptr + n.to(tl.int64) * Q_WIDTH + tile, old, other=0.0),)
        vs += (tl.load(v_ptr + n.to(tl.int64) * Q_WIDTH + tile, old, other=0.0),)
        ages += (age,)
    return ks, vs, ages


@triton.jit
def _attend_to_tiles(q, ks, vs, ages, new_k, new_v, t, lanes, first, end):
    """Attend to the keys before `end` in _load_old_tiles(), after inserting the key and value of age t.

    Return the tiles of keys, those of values, the largest score, the sum of weights and the weighted sum of values
    (BLOCK_D,).
    """
    BLOCK_KEYS: tl.constexpr = lanes.shape[0]
    all_k, all_v, scores = (), (), ()
    most = tl.full((BLOCK_KEYS,), LOWEST, tl.float32)
    for i in tl.static_range(len(ages)):
        is_new = (ages[i] == t)[:, None]
        all_k += (tl.where(is_new, new_k[None, :], ks[i]),)
        all_v += (tl.where(is_new, new_v[None, :], vs[i]),)
        s = tl.sum(all_k[i].to(tl.float32) * q[None, :], 1)
        s = tl.where(first + i * BLOCK_KEYS + lanes < end, s, -float("inf"))
        most = tl.maximum(most, s)
        scores += (s,)
    largest = tl.max(most, 0)
    sums = tl.zeros((BLOCK_KEYS,), tl.float32)
    outs = tl.zeros(all_v[0].shape, tl.float32)
    for i in tl.static_range(len(ages)):
        p = tl.exp2(scores[i] - largest)
        sums += p
        outs += all_v[i].to(tl.float32) * p[:, None]
    return all_k, all_v, largest, tl.sum(sums, 0), tl.sum(outs, 0)


@triton.jit
def _attend_in_loop(q, k_ptr, v_ptr, lanes, tile, in_head, first, last, end, Q_WIDTH: tl.constexpr):
    """Return the last three results of _attend_to_tiles(). The next tile arrives while this one is multiplied."""
    BLOCK_KEYS: tl.constexpr = lanes.shape[0]
    most = tl.full((BLOCK_KEYS,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK_KEYS,), tl.float32)
    outs = tl.zeros(tile.shape, tl.float32)
    mask = (first + lanes < last)[:, None] & in_head
    k_tile, v_tile = k_ptr + first.to(tl.int64) * Q_WIDTH, v_ptr + first.to(tl.int64) * Q_WIDTH
    next_k, next_v = tl.load(k_tile + tile, mask, other=0.0), tl.load(v_tile + tile, mask, other=0.0)
    for n in range(first, last, BLOCK_KEYS):
        k, v = next_k.to(tl.float32), next_v.to(tl.float32)
        mask = (n + BLOCK_KEYS + lanes < last)[:, None] & in_head
        k_tile += BLOCK_KEYS * Q_WIDTH
        v_tile += BLOCK_KEYS * Q_WIDTH
        next_k, next_v = tl.load(k_tile + tile, mask, other=0.0), tl.load(v_tile + tile, mask, other=0.0)
        s = tl.where(n + lanes < end, tl.sum(k * q[None, :], 1), -float("inf"))
        before = most
        most = tl.maximum(before, s)
        shrink, p = tl.exp2(before - most), tl.exp2(s - most)
        sums = sums * shrink + p
        outs = outs * shrink[:, None] + v * p[:, None]
    largest = tl.max(most, 0)
    weights = tl.exp2(most - largest)
    return largest, tl.sum(sums * weights, 0), tl.sum(outs * weights[:, None], 0)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _vector_attention_kernel(
    q_ptr,  # the arguments of _attention_kernel, with Hkv = H
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    count_ptr,  # (B H,)
    positions_ptr,
    scale,
    N,
    T,
    cache_rows,
    split_keys,
    D: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,  # tiles of a split, if it is short enough for registers; otherwise 0
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of the T queries of a head, one after the other. Each thread multiplies its keys with the query.

    With TILES, all keys and values of a split are in registers. Query t inserts the key of token t. Keys of later
    tokens are still zero, and masked. Otherwise a loop reads the tiles. A tile has BLOCK_KEYS lanes, one for each of
    its keys. Each lane has its own online softmax, so no thread waits for another one before all tiles are done.
    """
    HEADS: tl.constexpr = Q_WIDTH // D
    b, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    split = tl.program_id(1)
    lanes, d = tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_D)
    position = tl.load(positions_ptr + b)
    length = tl.minimum(position + T, cache_rows).to(tl.int32)
    active = tl.cdiv(length, split_keys)
    first = split * split_keys
    last = tl.minimum(first + split_keys, length)
    k_ptr += b * cache_rows * Q_WIDTH + head * D
    v_ptr += b * cache_rows * Q_WIDTH + head * D
    tile = lanes[:, None] * Q_WIDTH + d[None, :]
    in_head = (d < D)[None, :]
    ks, vs, ages = (), (), ()
    if TILES > 0:
        ks, vs, ages = _load_old_tiles(
            k_ptr, v_ptr, lanes, tile, in_head, first, last, position, T, cache_rows, Q_WIDTH, TILES
        )
    elif PDL:
        prefetch_keys(k_ptr, v_ptr, first, last, D, Q_WIDTH, BLOCK_KEYS)
    wait_for_earlier_kernels(PDL)
    # After the wait: before it, programs of proj took multiprocessors from the last programs of this kernel. A step of
    # one sequence with 1088 keys took 222 us, and now takes 212 (H200)
    launch_next_kernel(PDL)
    if split >= active:
        return
    for t in range(T):
        row = (b * T + t) * HEADS + head  # of (N H, D)
        end = tl.minimum(length - (T - 1 - t), last)
        q = tl.load(q_ptr + row * D + d, d < D, other=0.0).to(tl.float32) * scale
        if TILES > 0:
            new = (position + t) % cache_rows * Q_WIDTH + d
            new_k, new_v = tl.load(k_ptr + new, d < D, other=0.0), tl.load(v_ptr + new, d < D, other=0.0)
            ks, vs, largest, total, acc = _attend_to_tiles(q, ks, vs, ages, new_k, new_v, t, lanes, first, end)
        else:
            largest, total, acc = _attend_in_loop(q, k_ptr, v_ptr, lanes, tile, in_head, first, last, end, Q_WIDTH)
        total = tl.where(total > 0, total, 1.0)
        out = acc / total
        if SPLITS == 1 or active == 1:
            tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), d < D)
        else:
            part = split.to(tl.int64) * N * HEADS + row
            tl.store(part_ptr + part * D + d, out, d < D)
            tl.store(lse_ptr + part, largest + tl.log2(total))
    if SPLITS > 1 and active > 1:
        is_last = is_last_split(count_ptr + tl.program_id(0), active)
        if is_last:
            for t in range(T):
                row = (b * T + t) * HEADS + head
                out = combine_splits_of_row(part_ptr, lse_ptr, row, d, in_head, active, N, HEADS, D, SPLITS)
                tl.store(out_ptr + row * D + d[None, :], out.to(out_ptr.dtype.element_ty), in_head)
