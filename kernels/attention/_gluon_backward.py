"""The backward of gluon.py: five matmuls instead of seven, because one kernel computes all of it.

For a tile of 64 keys and 64 queries these are

    s = k q^T    p = exp2(s - lse)    dp = v dout^T    ds = p (dp - delta)    dv += p dout    dk += ds q    dq += ds^T k

A program takes a block of 128 keys and walks over the queries that see it. dk and dv of the block stay in registers.
dq cannot: every block of keys adds to it. The warps of a program have different roles:

    producer     one warp. By TMA it loads k and v of a block, then q, dout, lse and delta, 64 queries at a time
    consumers    two warpgroups. Each computes s, p, dp, ds, dk and dv for 64 of the 128 keys, and writes ds to shared
                 memory
    adder        one warpgroup. It multiplies ds^T k for all 128 keys, and adds the result to dq
    turns        two warps. wait_for_turns() waits for the program's turn at a tile of dq, and pass_turns_on() ends it

So no warpgroup waits for another one in the middle of a tile. While one computes exponentials, the tensor cores work
for the other two. The consumers' matmuls read p and ds from registers, and for D = 64 also k and v.

dq is summed in fp32 in memory. A thread adds four numbers with one red.add of 16 bytes. The sums lie in memory in the
order of the threads' registers, so no layout is converted.

The bits of a sum depend on its order, so the programs take turns at each tile of dq. _gluon_turns.py explains the
turns, and the tickets by which a program takes its next block.

    barrier           arrivals    who arrives                                       who waits
    queries.full             1    TMA, with q, dout, lse and delta                  consumers
    queries.empty            2    consumers                                         producer
    keys.full                1    TMA, with k and v                                 consumers, adder
    keys.empty               3    consumers, adder                                  producer
    products.full            3    consumers, with ds; wait_for_turns()              adder
    products.empty           2    adder, when it has read ds; pass_turns_on()       consumers, wait_for_turns()
    products.added           1    adder, when it has added to dq                    pass_turns_on()
    tickets.full             1    producer                                          all other warps
    tickets.empty            5    all other warps                                   producer

TFLOP/s of the backward on one H200 for (B, T, heads, D) in bf16, in one run (commit b7fb276). "before" is of an older
run (6245ceb). At T = 1024 it is a kernel whose programs computed whole heads, and elsewhere _triton_backward.py.

                          this kernel    before    FlashAttention 4    cuDNN
    (32, 1024, 12, 64)            398       299                 319      245
    (2, 16384, 12, 64)            532       394                 581      451
    (4, 4096, 16, 128)            541       419                 562      483

At T = 16,384 the GPU is at its power limit. At D = 128 a consumer needs 208 registers: with 200, ptxas waits for each
wgmma before the next instruction, and the kernel is 5% slower.

Beyond the last query TMA loads zeros for q and dout, and _lse_delta_kernel writes zeros for lse and delta. So p is 1
there, but it multiplies only zeros. Beyond the last key, the causal mask hides the keys from every real query. TMA does
not store beyond the tensor.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention._gluon_turns import (
    BLOCK,
    Tickets,
    head_and_block,
    pass_turns_on,
    read_ticket,
    take_ticket,
    wait_for_turns,
)
from kernels.attention._triton_tiles import align
from kernels.direct import custom_op
from kernels.gpu import multiprocessors
from kernels.hopper.registers import exp2, to_fp32
from kernels.hopper.ring import Ring, start_barriers, start_ring
from kernels.hopper.tma import allocate_tiles, fence_and_sync, head_tiles, load, store, thread_barrier, tma_descriptor
from kernels.matmul import round_to
from kernels.packed import gradient_buffer, gradient_views

LOG2E = gl.constexpr(1.4426950408889634)
TILE = gl.constexpr(64)  # queries of a tile, and keys of a consumer
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # (64, 64): s, dp, and dq
# dq in memory: four elements of a thread, then four of the next thread
FLAT = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0]))


class _Queries(NamedTuple):
    """Tiles of 64 queries. A slot of the ring is an index of q, dout, and lse_delta."""

    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    lse_delta: gl.shared_memory_descriptor
    ring: Ring


class _Keys(NamedTuple):
    """Blocks of 128 keys. Slot i has the consumers' tiles of k and v, 2 i and 2 i + 1."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    ring: Ring


class _Products(NamedTuple):
    """Tiles of ds of 128 keys and 64 queries. Slot i has the consumers' tiles, 2 i and 2 i + 1."""

    ds: gl.shared_memory_descriptor
    ring: Ring  # full: both consumers have written ds, and dq's turn has come
    added: gl.shared_memory_descriptor  # a barrier for each slot: the adder has added to dq


@gluon.jit
def _produce(q, k, v, dout, lse_delta, queries, keys, tickets, ticket_ptr, all_blocks, Hkv, T, GROUP: gl.constexpr):
    D: gl.constexpr = queries.q.shape[4]
    tiles = gl.cdiv(T, BLOCK) * 2
    block, tile = 0, 0  # how many were loaded so far
    ticket = take_ticket(tickets, ticket_ptr, block)
    while ticket < all_blocks:
        head, j = head_and_block(ticket, T)
        b, h_kv = head // Hkv, head % Hkv
        slot = keys.ring.slot(block)
        full = keys.ring.acquire(slot, 2 * BLOCK * D * 2)
        for consumer in gl.static_range(2):
            n = j * BLOCK + consumer * TILE
            load(k, [b, h_kv, n, 0], full, keys.k.index(slot.index * 2 + consumer))
            load(v, [b, h_kv, n, 0], full, keys.v.index(slot.index * 2 + consumer))
        for member in range(GROUP):
            h = h_kv * GROUP + member
            for i in range(2 * j, tiles):
                slot = queries.ring.slot(tile)
                full = queries.ring.acquire(slot, 2 * TILE * D * 2 + 2 * TILE * 4)
                load(q, [b, h, i * TILE, 0], full, queries.q.index(slot.index))
                offset = ((b * Hkv * GROUP + h) * tiles + i) * (2 * TILE)
                load(lse_delta, [offset], full, queries.lse_delta.index(slot.index))
                load(dout, [b, h, i * TILE, 0], full, queries.dout.index(slot.index))
                tile += 1
        block += 1
        ticket = take_ticket(tickets, ticket_ptr, block)


@gluon.jit
def _start_matmul(k_or_v, q_or_dout):
    """Start k_or_v (64, D) x q_or_dout^T (D, 64) on the tensor cores. The caller waits for the result."""
    unused = gl.zeros((TILE, TILE), gl.float32, SCORES)
    return warpgroup_mma(k_or_v, q_or_dout.permute((1, 0)), unused, use_acc=False, is_async=True)


@gluon.jit
def _start_scores(k, queries, tile, exists):
    """Wait for a tile's queries and start its s. If the tile does not exist, do not wait: nobody reads the result."""
    slot = queries.ring.slot(tile)
    queries.ring.wait_full(slot, pred=exists)
    return _start_matmul(k, queries.q.index(slot.index).reshape([TILE, queries.q.shape[4]]))


@gluon.jit
def _compute_tile(
    s, k, v, dk_sum, dv_sum, tile, more, queries, products, scales, CONSUMER: gl.constexpr, DIAGONAL: gl.constexpr
):
    """Add a tile to dk and dv, and write its ds. Return s of the next tile, both sums, and tile + 1.

    Without `more` there is no next tile, and s is not valid. For D = 64, dp is computed during the exponentials, and
    the next s during dk. For D = 128 there are too few registers for that: s and dp are computed just before their use,
    and p is kept in 16 bits.
    """
    D: gl.constexpr = queries.q.shape[4]
    dtype: gl.constexpr = queries.q.dtype
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    slot, slot_ds = queries.ring.slot(tile), products.ring.slot(tile)
    q, dout = queries.q.index(slot.index).reshape([TILE, D]), queries.dout.index(slot.index).reshape([TILE, D])
    if D == 64:
        dp = _start_matmul(v, dout)
    else:
        s = _start_scores(k, queries, tile, True)
        s = warpgroup_mma_wait(0, deps=(s,))
    if DIAGONAL:
        key, query = gl.arange(0, TILE, gl.SliceLayout(1, SCORES)), gl.arange(0, TILE, QUERIES)
        s = gl.where(key[:, None] <= query[None, :], s, -float("inf"))
    lse = queries.lse_delta.index(slot.index).slice(0, TILE).load(QUERIES)
    p = exp2(s * scales[1] - lse[None, :])
    p_factor = round_to(p, dtype)
    dv_sum = warpgroup_mma(gl.convert_layout(p_factor, FACTOR, assert_trivial=True), dout, dv_sum, is_async=True)
    if D == 64:
        dp = warpgroup_mma_wait(1, deps=(dp,))
    else:
        p = to_fp32(p_factor)
        dp = _start_matmul(v, dout)
        dp, dv_sum = warpgroup_mma_wait(0, deps=(dp, dv_sum))
    delta = queries.lse_delta.index(slot.index).slice(TILE, TILE).load(QUERIES)
    ds = (p * (dp - delta[None, :])).to(dtype)
    products.ring.wait_empty(slot_ds)
    products.ds.index(slot_ds.index * 2 + CONSUMER).store(ds)
    fence_async_shared()  # the tensor cores will read ds
    dk_sum = warpgroup_mma(gl.convert_layout(ds, FACTOR, assert_trivial=True), q, dk_sum, is_async=True)
    products.ring.arrive_full(slot_ds)
    if D == 64:
        s = _start_scores(k, queries, tile + 1, more)
        dk_sum, dv_sum = warpgroup_mma_wait(1, deps=(dk_sum, dv_sum))
        queries.ring.arrive_empty(slot)
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        dk_sum = warpgroup_mma_wait(0, deps=(dk_sum,))
        queries.ring.arrive_empty(slot)
    return s, dk_sum, dv_sum, tile + 1


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, dk, dv, grads_smem, queries, keys, products, tickets, scales, all_blocks, Hkv, T,
    GROUP: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = queries.q.shape[4]
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # (64, D): dk and dv
    tiles = gl.cdiv(T, BLOCK) * 2
    block, tile = 0, 0
    ticket = read_ticket(tickets, block)
    while ticket < all_blocks:
        head, j = head_and_block(ticket, T)
        b, h_kv = head // Hkv, head % Hkv
        slot_kv = keys.ring.slot(block)
        keys.ring.wait_full(slot_kv)
        k = keys.k.index(slot_kv.index * 2 + CONSUMER).reshape([TILE, D])
        v = keys.v.index(slot_kv.index * 2 + CONSUMER).reshape([TILE, D])
        if D == 64:
            k = k.load(gl.DotOperandLayout(0, SCORES, 2))
            v = v.load(gl.DotOperandLayout(0, SCORES, 2))
        dk_sum = gl.zeros((TILE, D), gl.float32, SUM)
        dv_sum = gl.zeros((TILE, D), gl.float32, SUM)
        for _member in range(GROUP):
            if CONSUMER == 1:  # the first 64 queries of the block do not see its keys
                slot, slot_ds = queries.ring.slot(tile), products.ring.slot(tile)
                queries.ring.wait_full(slot)
                queries.ring.arrive_empty(slot)
                products.ring.wait_empty(slot_ds)
                products.ring.arrive_full(slot_ds)
                tile += 1
            s = gl.zeros((TILE, TILE), gl.float32, SCORES)
            if D == 64:
                s = _start_scores(k, queries, tile, True)
                s = warpgroup_mma_wait(0, deps=(s,))
            more = 2 * j + 2 < tiles
            s, dk_sum, dv_sum, tile = _compute_tile(
                s, k, v, dk_sum, dv_sum, tile, CONSUMER == 0 or more, queries, products, scales, CONSUMER, DIAGONAL=True
            )
            if CONSUMER == 0:
                s, dk_sum, dv_sum, tile = _compute_tile(
                    s, k, v, dk_sum, dv_sum, tile, more, queries, products, scales, CONSUMER, DIAGONAL=False
                )
            for i in range(2 * j + 2, tiles):
                s, dk_sum, dv_sum, tile = _compute_tile(
                    s, k, v, dk_sum, dv_sum, tile, i + 1 < tiles, queries, products, scales, CONSUMER, DIAGONAL=False
                )
        fence_async_shared()  # TMA will overwrite k and v
        keys.ring.arrive_empty(slot_kv)
        n = j * BLOCK + CONSUMER * TILE
        OTHERS: gl.constexpr = grads_smem.shape[0] // 2 - 1  # stores that may still read their own shared memory
        _store(dv, [b, h_kv, n, 0], grads_smem.index(CONSUMER), dv_sum, OTHERS)
        _store(dk, [b, h_kv, n, 0], grads_smem.index(OTHERS * 2 + CONSUMER), dk_sum * scales[0], OTHERS)
        block += 1
        ticket = read_ticket(tickets, block)
    tma.store_wait(0)  # the program must not end while a store still reads its shared memory


@gluon.jit
def _store(descriptor, position, smem, x, OTHERS: gl.constexpr):
    """Wait until at most OTHERS stores still read their shared memory, then store x (64, D) by TMA."""
    tma.store_wait(OTHERS)
    thread_barrier()  # one thread has waited
    smem.reshape([TILE, x.shape[1]]).store(x.to(descriptor.dtype))
    fence_and_sync()
    store(descriptor, position, smem)


@gluon.jit
def _add_tile(
    dq_smem, keys, slot_kv, tile, products, sums_ptr, dq, b, h, i, j, scale,
    IS_FIRST: gl.constexpr,  # whether no block has added to this tile before
    CONSUMERS: gl.constexpr,  # 1 if the tile sees only the first consumer's keys, otherwise 2
):  # fmt: skip
    """Add the product of block j to tile i of dq. Return tile + 1."""
    D: gl.constexpr = keys.k.shape[4]
    slot = products.ring.slot(tile)
    part = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, FLAT)))
    thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, FLAT)))
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, FLAT)))
    sums_ptr += gl.cast(i, gl.int64) * (TILE * D)
    sums_ptr += part[:, None, None] * 512 + thread[None, :, None] * 4 + number[None, None, :]
    products.ring.wait_full(slot)
    if j == 0:
        tma.store_wait(0)  # wait until the previous store has read dq_smem
        thread_barrier()
    for start in gl.static_range(0, D, 64):
        sums = gl.zeros((TILE, 64), gl.float32, SCORES)
        if not IS_FIRST:
            # not from the L1, because the sums come from other multiprocessors
            flat = gl.load(sums_ptr, mask=j == 0, other=0.0, cache_modifier=".cg")
            sums = flat.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(TILE, 64)
            sums = gl.convert_layout(sums, SCORES, assert_trivial=True)
        for consumer in gl.static_range(CONSUMERS):
            k = keys.k.index(slot_kv.index * 2 + consumer).reshape([TILE, D]).slice(start, 64, 1)
            ds = products.ds.index(slot.index * 2 + consumer).permute((1, 0))
            sums = warpgroup_mma(ds, k, sums, use_acc=not IS_FIRST or consumer > 0, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        if start == D - 64:
            products.ring.arrive_empty(slot)
        if j > 0:
            flat = sums.reshape(4, 2, 8, 8, 4, 2).permute(3, 0, 2, 4, 1, 5).reshape(8, 128, 4)
            flat = gl.convert_layout(flat, FLAT, assert_trivial=True)
            if IS_FIRST:
                gl.store(sums_ptr, flat)
            else:
                gl.atomic_add(sums_ptr, flat, sem="relaxed", scope="gpu")
        else:
            dq_smem.reshape([TILE, D]).slice(start, 64, 1).store((sums * scale).to(dq.dtype))
        sums_ptr += TILE * 64
    if j == 0:
        fence_and_sync()
        store(dq, [b, h, i * TILE, 0], dq_smem)
    thread_barrier()  # every thread has added
    mbarrier.arrive(products.added.index(slot.index))
    return tile + 1


@gluon.jit
def _add(dq, dq_smem, keys, products, tickets, sums_ptr, scale, heads_in_sums, all_blocks, Hkv, T, GROUP: gl.constexpr):
    D: gl.constexpr = keys.k.shape[4]
    tiles = gl.cdiv(T, BLOCK) * 2
    block, tile = 0, 0
    ticket = read_ticket(tickets, block)
    while ticket < all_blocks:
        head, j = head_and_block(ticket, T)
        b, h_kv = head // Hkv, head % Hkv
        slot = keys.ring.slot(block)
        keys.ring.wait_full(slot)
        for member in range(GROUP):
            h = h_kv * GROUP + member
            sums_offset = (head % heads_in_sums * GROUP + member).to(gl.int64) * tiles * (TILE * D)
            tile = _add_tile(
                dq_smem, keys, slot, tile, products, sums_ptr + sums_offset, dq, b, h, 2 * j, j, scale,
                IS_FIRST=True, CONSUMERS=1,
            )  # fmt: skip
            tile = _add_tile(
                dq_smem, keys, slot, tile, products, sums_ptr + sums_offset, dq, b, h, 2 * j + 1, j, scale,
                IS_FIRST=True, CONSUMERS=2,
            )  # fmt: skip
            for i in range(2 * j + 2, tiles):
                tile = _add_tile(
                    dq_smem, keys, slot, tile, products, sums_ptr + sums_offset, dq, b, h, i, j, scale,
                    IS_FIRST=False, CONSUMERS=2,
                )  # fmt: skip
        keys.ring.arrive_empty(slot)
        block += 1
        ticket = read_ticket(tickets, block)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads_in_sums", "all_blocks", "Hkv", "T"])
def _attention_bwd_gluon_kernel(
    q, k, v, dout, dq, dk, dv, lse_delta, sums_ptr, turns_ptr, scale, scale_log2, heads_in_sums, all_blocks, Hkv, T,
    GROUP: gl.constexpr, SLOTS: gl.constexpr, SLOTS_KV: gl.constexpr, SLOTS_DS: gl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dv of all heads.

    q, dout and dq are descriptors of (B, H, T, D) tensors; k, v, dk and dv of (B, Hkv, T, D) tensors. lse_delta is a
    descriptor of what _lse_delta_kernel writes. sums_ptr points to fp32 memory for `heads_in_sums` key heads of dq.
    turns_ptr points to zeros: the counter of tickets, then a counter for each tile in that memory. `all_blocks` is the
    number of blocks of all heads. scale_log2 is scale * LOG2E, which takes no register as an argument.
    """
    dtype: gl.constexpr = q.dtype
    q_slots = allocate_tiles(q, SLOTS)
    dout_slots = allocate_tiles(dout, SLOTS)
    lse_delta_slots = allocate_tiles(lse_delta, SLOTS)
    k_slots = allocate_tiles(k, 2 * SLOTS_KV)
    v_slots = allocate_tiles(v, 2 * SLOTS_KV)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TILE], dtype)
    ds_slots = gl.allocate_shared_memory(dtype, [2 * SLOTS_DS, TILE, TILE], ds_layout)
    dq_smem = gl.allocate_shared_memory(dtype, q.block_type.shape, q.layout)
    # dv and dk of each consumer, in the same memory if D = 128
    grads_smem = allocate_tiles(dk, 256 // k.block_type.shape[3])
    ticket_slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # the arrivals are those of the table above
    queries = _Queries(q_slots, dout_slots, lse_delta_slots, start_ring(SLOTS, CONSUMERS=2))
    keys = _Keys(k_slots, v_slots, start_ring(SLOTS_KV, CONSUMERS=3))
    full, empty, added = start_barriers(SLOTS_DS, (3, 2, 1))
    products = _Products(ds_slots, Ring(full, empty), added)
    tickets = Tickets(ticket_slots, start_ring(2, CONSUMERS=5))
    fence_and_sync()
    scales = scale, scale_log2
    gl.warp_specialize([
        (_consume, (0, dk, dv, grads_smem, queries, keys, products, tickets, scales, all_blocks, Hkv, T, GROUP)),
        (_consume, (1, dk, dv, grads_smem, queries, keys, products, tickets, scales, all_blocks, Hkv, T, GROUP)),
        (_add, (dq, dq_smem, keys, products, tickets, sums_ptr, scale, heads_in_sums, all_blocks, Hkv, T, GROUP)),
        (_produce, (q, k, v, dout, lse_delta, queries, keys, tickets, turns_ptr, all_blocks, Hkv, T, GROUP)),
        (wait_for_turns, (products, tickets, turns_ptr + 1, heads_in_sums, all_blocks, T, GROUP)),
        (pass_turns_on, (products, tickets, turns_ptr + 1, heads_in_sums, all_blocks, T, GROUP)),
    ], [4, 4, 1, 1, 1], [208, 72, 24, 24, 24])  # fmt: skip


@triton.jit(do_not_specialize=["stride", "T", "H", "tiles"])
def _lse_delta_kernel(
    dout_ptr,  # (B, T, H, D); out has the same shape
    out_ptr,
    lse_ptr,  # (B H, T) fp32; `stride` is the distance from one head to the next
    lse_delta_ptr,  # (B H, tiles, 2, TILE) fp32: lse and delta of each tile of queries
    stride,
    T,
    H,
    tiles,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute delta, and write lse and delta of each tile of queries side by side, with 0 beyond the last query."""
    h, i, b = tl.program_id(0) % H, tl.program_id(0) // H % tiles, tl.program_id(0) // H // tiles
    row, d = i * TILE + tl.arange(0, TILE), tl.arange(0, D)
    offsets = ((tl.cast(b, tl.int64) * T + row) * H + h)[:, None] * D + d[None, :]
    in_bounds = row < T
    dout = tl.load(dout_ptr + offsets, in_bounds[:, None], other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offsets, in_bounds[:, None], other=0.0).to(tl.float32)
    head = tl.cast(b * H + h, tl.int64)
    lse = tl.load(lse_ptr + head * stride + row, in_bounds, other=0.0)
    lse_delta_ptr += (head * tiles + i) * (2 * TILE) + tl.arange(0, TILE)
    tl.store(lse_delta_ptr, lse)
    tl.store(lse_delta_ptr + TILE, tl.sum(dout * out, 1))


# The kernel takes 219 KB of shared memory for D = 64, 209 for D = 128
LAUNCH = {
    64: {"SLOTS": 4, "SLOTS_KV": 2, "SLOTS_DS": 3},
    128: {"SLOTS": 2, "SLOTS_KV": 1, "SLOTS_DS": 2},
}


def launch_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Return dq, dk and dv in one tensor, as packed.gradient_buffer() allocates it. refusal() of gluon.py is None."""
    grads = gradient_buffer(q, k)
    dq, dk, dv = gradient_views(grads, q, k)
    q, k, v, dout = (align(tensor) for tensor in (q, k, v, dout.contiguous()))
    B, T, H, D = q.shape
    Hkv, size = k.shape[2], TILE.value
    blocks = triton.cdiv(T, BLOCK.value)  # of keys; each has two tiles of queries
    tiles = 2 * blocks
    lse_delta = torch.empty(B * H * tiles * 2 * size, dtype=torch.float32, device=q.device)
    _lse_delta_kernel[(B * H * tiles,)](
        dout_ptr=dout,
        out_ptr=out.contiguous(),
        lse_ptr=lse,
        lse_delta_ptr=lse_delta,
        stride=lse.stride(1),
        T=T,
        H=H,
        tiles=tiles,
        D=D,
        TILE=size,
    )
    programs = min(B * Hkv * blocks, multiprocessors(q.device))
    # While one program computes the longest block of a head, each program computes two blocks of mean length
    heads_in_sums = min(B * Hkv, triton.cdiv(2 * programs, blocks) + 1)
    sums = torch.empty(heads_in_sums * H // Hkv, tiles, size, D, dtype=torch.float32, device=q.device)
    turns = torch.zeros(1 + heads_in_sums * H // Hkv * tiles, dtype=torch.int32, device=q.device)
    _attention_bwd_gluon_kernel[(programs,)](
        q=head_tiles(q, size),
        k=head_tiles(k, size),
        v=head_tiles(v, size),
        dout=head_tiles(dout, size),
        dq=head_tiles(dq, size),
        dk=head_tiles(dk, size),
        dv=head_tiles(dv, size),
        lse_delta=tma_descriptor(lse_delta, 2 * size),
        sums_ptr=sums,
        turns_ptr=turns,
        scale=scale,
        scale_log2=scale * LOG2E.value,
        heads_in_sums=heads_in_sums,
        all_blocks=B * Hkv * blocks,
        Hkv=Hkv,
        T=T,
        GROUP=H // Hkv,
        num_warps=4,
        maxnreg=128,  # registers per thread when 16 warps start. Then the consumers get more, and the others fewer
        **LAUNCH[D],
    )
    return grads


attention_bwd = custom_op("hotswap::attention_gluon_bwd", launch_backward, lambda dout, q, k, *_: gradient_buffer(q, k))
