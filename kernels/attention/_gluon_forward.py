"""The forward of gluon.py. Groups of warps share the keys, and matmuls run beside exponentials.

A program computes one tile of queries after another. Its warps have different roles:

    producer     one warp. It loads the tile's queries, and all keys and values that they see, 128 at a time, by TMA
    consumers    two or three warpgroups. Each computes 64 queries of the tile, as _fwd_kernel in triton.py does

For each block of 128 keys, a consumer starts q k^T, then starts p v of the previous block, waits for q k^T and computes
its softmax. During the softmax the tensor cores work for the other consumers (Shah et al. 2024, arXiv:2407.08608). Two
consumers take turns to start their matmuls. Three need no turns, and are faster if p v runs during their own softmax.

A consumer begins with the block on the diagonal, so that it masks its first block and no other.

The plan. Behind a causal mask the last tile of a head takes 8 times as long as the first, at T = 1024 and with tiles of
128. If program i of P computed tiles i, i + P, i + 2 P and so on, the slowest program would take 5 to 27% longer than
the mean. So plan() gives each tile, long ones first, to the program that has the least to do so far. The kernel reads
the plan from memory. While the consumers finish a tile, the producer already loads the next one.

TFLOP/s on one H200 for (B, T, heads, D) in bf16, in one run (commit b7fb276). _fwd_kernel of triton.py had 295, 449 and
462 in an older run:

                          this kernel    FlashAttention 4    cuDNN
    (32, 1024, 12, 64)            344                 267      336
    (2, 16384, 12, 64)            557                 572      448
    (4, 4096, 16, 128)            658                 647      584

Keys and values come through two rings of slots, and kernels/hopper/ring.py explains them. In the ring of the queries
each consumer has its own slot. Beyond the last token TMA loads zeros and stores nothing, and the causal mask hides
these keys from every real query.
"""

import functools
import heapq

import numpy as np
import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.attention._triton_tiles import heads_in_l2
from kernels.compat import fake_mode
from kernels.gpu import make_context_current, multiprocessors
from kernels.hopper.registers import exp2
from kernels.hopper.ring import Slot, start_ping_pong, start_ring
from kernels.hopper.tma import allocate_tiles, fence_and_sync, head_tiles, load, store

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)  # below every score, but finite, because -inf - -inf would be NaN
ROWS = gl.constexpr(64)  # queries of a consumer
BLOCK_N = gl.constexpr(128)  # keys
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # (ROWS, BLOCK_N)
LONG = 3072  # from this many tokens on, three consumers are faster than two, for D = 64


@gluon.jit
def _produce(q, k, v, slots, plan_ptr, H, T, GROUP: gl.constexpr):
    q_slots, k_slots, v_slots, queries, keys, values = slots
    CONSUMERS: gl.constexpr = q_slots.shape[0]
    D: gl.constexpr = k_slots.shape[4]
    tiles = gl.cdiv(T, CONSUMERS * ROWS)
    plan_ptr += gl.program_id(0)
    count = gl.load(plan_ptr)
    block = 0  # how many were loaded so far
    for i in range(count):
        plan_ptr += gl.num_programs(0)
        tile = gl.load(plan_ptr)
        m, b, h = tile % tiles * (CONSUMERS * ROWS), tile // tiles // H, tile // tiles % H
        for consumer in gl.static_range(CONSUMERS):
            full = queries.acquire(Slot(consumer, i & 1), ROWS * D * 2)
            load(q, [b, h, m + consumer * ROWS, 0], full, q_slots.index(consumer))
        blocks = gl.cdiv(min(m + CONSUMERS * ROWS, T), BLOCK_N)
        for j in range(blocks):
            n, slot = (blocks - 1 - j) * BLOCK_N, keys.slot(block)
            full = keys.acquire(slot, BLOCK_N * D * 2)
            load(k, [b, h // GROUP, n, 0], full, k_slots.index(slot.index))
            full = values.acquire(slot, BLOCK_N * D * 2)
            load(v, [b, h // GROUP, n, 0], full, v_slots.index(slot.index))
            block += 1


@gluon.jit
def _start_scores(q, k, ping_pong, block, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Start q k^T of a block on the tensor cores. The caller waits for the result."""
    k = k.reshape([BLOCK_N, k.shape[3]])
    if CONSUMERS == 2:
        ping_pong.wait(CONSUMER, block & 1)
    unused = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
    return warpgroup_mma(q, k.permute((1, 0)), unused, use_acc=False, is_async=True)


@gluon.jit
def _queries(m):
    return m + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))


@gluon.jit
def _softmax(s, largest, scale):
    """Return p in fp32, the new maxima, the factor that rescales older sums to them, and the sums of p.

    `largest` has the old maxima. The sums of p are (ROWS, 4): four threads hold a row, and each keeps its own sum, so
    that they need no exchange.
    """
    before = largest
    largest = gl.maximum(before, gl.max(s, 1) * (scale * LOG2E))
    p = exp2(s * (scale * LOG2E) - largest[:, None])
    sums = gl.sum(gl.sum(p.reshape(ROWS, BLOCK_N // 8, 4, 2), 3), 1)
    return p, largest, exp2(before - largest), sums


@gluon.jit
def _consume(CONSUMER: gl.constexpr, out, lse_ptr, out_slots, ping_pong, slots, plan_ptr, lse_stride, scale, H, T):
    q_slots, k_slots, v_slots, queries, keys, values = slots
    CONSUMERS: gl.constexpr = q_slots.shape[0]
    D: gl.constexpr = k_slots.shape[4]
    dtype: gl.constexpr = k_slots.dtype
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # (ROWS, D)
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    # q in registers saves reads of shared memory, but only two consumers with D = 64 have registers to spare
    Q_IN_REGISTERS: gl.constexpr = CONSUMERS == 2 and D == 64
    tiles = gl.cdiv(T, CONSUMERS * ROWS)
    plan_ptr += gl.program_id(0)
    count = gl.load(plan_ptr)
    next_tile = gl.load(plan_ptr + gl.num_programs(0))
    block = 0
    for i in range(count):
        tile = next_tile
        plan_ptr += gl.num_programs(0)
        next_tile = gl.load(plan_ptr + gl.num_programs(0))  # arrives during this tile
        tile_m, b, h = tile % tiles * (CONSUMERS * ROWS), tile // tiles // H, tile // tiles % H
        m = tile_m + CONSUMER * ROWS
        blocks = gl.cdiv(min(m + ROWS, T), BLOCK_N)
        loaded = gl.cdiv(min(tile_m + CONSUMERS * ROWS, T), BLOCK_N)
        for _ in range(loaded - blocks):  # only the last consumers see these blocks
            slot = keys.slot(block)
            keys.wait_full(slot)
            keys.arrive_empty(slot)
            values.wait_full(slot)
            values.arrive_empty(slot)
            block += 1

        query_slot = Slot(CONSUMER, i & 1)
        queries.wait_full(query_slot)
        q = q_slots.index(CONSUMER).reshape([ROWS, D])
        if Q_IN_REGISTERS:
            q = q.load(gl.DotOperandLayout(0, SCORES, 2))
            fence_async_shared()
            queries.arrive_empty(query_slot)
        slot = keys.slot(block)
        keys.wait_full(slot)
        s = _start_scores(q, k_slots.index(slot.index), ping_pong, block, CONSUMER, CONSUMERS)
        if CONSUMERS == 2:
            ping_pong.pass_on(CONSUMER)
        s = warpgroup_mma_wait(0, deps=(s,))
        keys.arrive_empty(slot)
        key = (blocks - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        s = gl.where(key[None, :] <= _queries(m)[:, None], s, -float("inf"))
        largest = gl.full((ROWS,), LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        p, largest, _, total = _softmax(s, largest, scale)
        p = gl.convert_layout(p.to(dtype), P, assert_trivial=True)
        acc = gl.zeros((ROWS, D), gl.float32, OUT)
        if CONSUMERS == 3:
            keys.wait_full(keys.slot(block + 1), pred=blocks > 1)
        for j in range(1, blocks):
            before, slot = keys.slot(block), keys.slot(block + 1)
            block += 1
            if CONSUMERS == 2:
                keys.wait_full(slot)
            s = _start_scores(q, k_slots.index(slot.index), ping_pong, block, CONSUMER, CONSUMERS)
            values.wait_full(before)
            acc = warpgroup_mma(p, v_slots.index(before.index).reshape([BLOCK_N, D]), acc, is_async=True)
            if CONSUMERS == 2:
                ping_pong.pass_on(CONSUMER)
            s = warpgroup_mma_wait(1, deps=(s,))
            keys.arrive_empty(slot)
            p, largest, shrink, sums = _softmax(s, largest, scale)
            total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + sums
            p = gl.convert_layout(p.to(dtype), P, assert_trivial=True)
            if CONSUMERS == 3:
                # ptxas would move the wait for acc to before the softmax. It does not move it to before this wait for
                # keys, because that is a loop
                keys.wait_full(keys.slot(block + 1), pred=j + 1 < blocks)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            values.arrive_empty(before)
            acc *= gl.convert_layout(shrink, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]

        if not Q_IN_REGISTERS:
            queries.arrive_empty(query_slot)
        slot = keys.slot(block)
        values.wait_full(slot)
        acc = warpgroup_mma(p, v_slots.index(slot.index).reshape([BLOCK_N, D]), acc, is_async=True)
        block += 1
        row_total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
        gl.store(
            lse_ptr + (b * H + h).to(gl.int64) * lse_stride + _queries(m), largest + gl.log2(row_total), _queries(m) < T
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values.arrive_empty(slot)
        acc *= gl.convert_layout(1 / row_total, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
        tma.store_wait(0)  # wait until the previous store has read its shared memory
        out_slots.index(CONSUMER).reshape([ROWS, D]).store(acc.to(dtype))
        fence_and_sync()
        store(out, [b, h, m, 0], out_slots.index(CONSUMER))
    tma.store_wait(0)  # the program must not end while a store still reads its shared memory


@gluon.jit(do_not_specialize=["lse_stride", "H", "T"])
def _attention_fwd_gluon_kernel(
    q, k, v, out, lse_ptr, plan_ptr, lse_stride, scale, H, T,
    GROUP: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Compute out and lse of all heads.

    q and out are descriptors of (B, H, T, D) tensors, k and v of (B, Hkv, T, D) tensors. lse_ptr points to (B, H, T)
    in fp32, and lse_stride is the distance from one head to the next. plan_ptr points to what plan() returns.
    """
    q_slots = allocate_tiles(q, CONSUMERS)
    out_slots = allocate_tiles(out, CONSUMERS)
    k_slots = allocate_tiles(k, SLOTS)
    v_slots = allocate_tiles(v, SLOTS)
    # three consumers take no turns; without their third barrier the kernel compiles differently, which nobody has timed
    queries, ping_pong = start_ring(CONSUMERS), start_ping_pong(CONSUMERS)
    keys, values = start_ring(SLOTS, CONSUMERS=CONSUMERS), start_ring(SLOTS, CONSUMERS=CONSUMERS)
    fence_and_sync()
    slots = q_slots, k_slots, v_slots, queries, keys, values
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (0, out, lse_ptr, out_slots, ping_pong, slots, plan_ptr, lse_stride, scale, H, T)),
            (_consume, (1, out, lse_ptr, out_slots, ping_pong, slots, plan_ptr, lse_stride, scale, H, T)),
            (_produce, (q, k, v, slots, plan_ptr, H, T, GROUP)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, out, lse_ptr, out_slots, ping_pong, slots, plan_ptr, lse_stride, scale, H, T)),
            (_consume, (1, out, lse_ptr, out_slots, ping_pong, slots, plan_ptr, lse_stride, scale, H, T)),
            (_consume, (2, out, lse_ptr, out_slots, ping_pong, slots, plan_ptr, lse_stride, scale, H, T)),
            (_produce, (q, k, v, slots, plan_ptr, H, T, GROUP)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


@functools.lru_cache
def plan(T: int, M: int, heads: int, heads_at_once: int, programs: int) -> np.ndarray:
    """Return which blocks of M tokens each program computes, (1 + rounds, programs) int32.

    A column is for one program: how many blocks it computes, their numbers, then zeros. With `blocks` blocks in a head,
    block i of head h has the number h * blocks + i, and is the longer, the larger i is. Blocks of the first
    `heads_at_once` heads come first, and among them long blocks.

    With 12 heads, a plan takes 30 ms for 64 x 1024 tokens, and 2.5 s for one sequence of 8 million tokens.
    """
    blocks = triton.cdiv(T, M)
    free = [(0, program) for program in range(programs)]  # (when the program is free, its number)
    numbers = [[] for _ in range(programs)]
    for first in range(0, heads, heads_at_once):
        for i in reversed(range(blocks)):
            for head in range(first, min(first + heads_at_once, heads)):
                time, program = free[0]
                numbers[program].append(head * blocks + i)
                tiles = triton.cdiv(min((i + 1) * M, T), BLOCK_N.value)
                heapq.heapreplace(free, (time + tiles + 1, program))  # start and end take as long as a tile
    rounds = 1 + max(map(len, numbers), default=0)  # a program reads one number beyond its last block
    columns = [[len(column), *column, *[0] * (rounds - len(column))] for column in numbers]
    return np.array(columns, np.int32).T.copy()


@functools.cache  # without a limit: a captured CUDA graph reads its plan in every replay, so no plan may be freed
def _plan_tensor(device: torch.device, *arguments: int) -> Tensor:
    return torch.tensor(plan(*arguments)).to(device)


def plan_tensor(device: torch.device, *arguments: int) -> Tensor:
    """Return plan(*arguments) on the device. Each plan is made once."""
    if fake_mode():  # a fake tensor serves only its FakeTensorMode
        return _plan_tensor.__wrapped__(device, *arguments)
    return _plan_tensor(device, *arguments)


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
    """Write out (B, T, H, D), and lse (B, H, T or more) as attention_fwd() in triton.py describes it.

    refusal() of gluon.py is None, and can_use_tma() is true for q, k, v and out.
    """
    B, T, H, D = q.shape
    rows = ROWS.value
    consumers = 3 if D == 64 and T >= LONG else 2
    programs = min(triton.cdiv(T, consumers * rows) * B * H, multiprocessors(q.device))
    make_context_current()
    _attention_fwd_gluon_kernel[(programs,)](
        q=head_tiles(q, rows),
        k=head_tiles(k, BLOCK_N.value),
        v=head_tiles(v, BLOCK_N.value),
        out=head_tiles(out, rows),
        lse_ptr=lse,
        plan_ptr=plan_tensor(q.device, T, consumers * rows, B * H, heads_in_l2(k), programs),
        lse_stride=lse.stride(1),
        scale=scale,
        H=H,
        T=T,
        GROUP=H // k.shape[2],
        CONSUMERS=consumers,
        SLOTS=4 if D == 64 else 2,  # at D = 128, 128 keys take 32 KB and their values as much
        num_warps=4,
        # registers per thread when the warps start. The producer's warpgroup then gives most of its own to the others
        maxnreg=128 if consumers == 3 else 168,
    )
