"""The backward of triton.py for Hopper, in Gluon: five matmuls instead of seven, because one program sums a head's dq.

A tile has a row for each of 128 keys and a column for each of 64 queries. It costs five matmuls:

    s = k q^T    p = exp2(s - lse)    dp = v dout^T    ds = p (dp - delta)    dv += p dout    dk += ds q    dq += ds^T k

A program takes one block of keys after another. dk and dv of the block stay in registers while the program walks over
the queries. dq cannot stay in registers, because every block of keys adds to it. So a program takes all blocks of a
head, and sums dq in fp32 in memory that no other program uses. It waits for no other program, and the order of the
additions is fixed. In this memory a thread reads only sums that it has written itself, in the order of its registers,
so no layout is converted and no barrier is necessary. The first block of keys of a head stores dq, and later blocks add
to it. The block on the diagonal is the last block that a query sees, so it writes the final dq.

For a tile a multiprocessor does 1280 clocks of matmuls and 512 of exponentials, and moves 32 KB of dq: it reads 16 KB
and writes 16 KB. dq stays in the L2 while the L2 has room for 256 T bytes per program. On average half of these bytes
are in use: at T = 1024, 17 MB of an H200's 50 MB. In one run on an H200, a backward of 12 heads took:

    B = 64, T = 1024    0.94 ms, and 1.09 ms with the two kernels of _triton_backward.py
    B = 22, T = 2048    1.23 ms, and 1.24 ms with the two kernels

For heads of 128 channels a version of this kernel spilled registers and was slower than the two kernels.

The 227 KB of shared memory have room for one program per multiprocessor. Its warps have two roles:

    producer     one warp. By TMA it loads k and v for blocks of keys into two slots, and q, dout, lse and delta for
                 blocks of queries into a ring of four slots
    consumers    two warpgroups. For s, p, dp, ds, dk and dv each computes 64 of the 128 keys. For dq each computes 32
                 of the 64 channels and needs ds of all keys. So they exchange ds through shared memory, and synchronize
                 when ds is written and when it has been read

Matmuls run while their warps do other work: dp runs while the warps compute p, dv while they compute ds, and s of the
next tile while they store dq. p and ds enter matmuls as first factors, directly from registers. Each slot has one
barrier for "full" (its bytes have arrived) and one for "empty", as in mlp/_gluon.py.

Beyond the last query TMA loads zeros for q and dout, and _lse_delta_kernel has written zeros for lse and delta. So p
is 1 there, but p is multiplied only by zeros. Beyond the last key, the causal mask hides the keys from every real
query. TMA does not store beyond the tensor.
"""

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

from kernels.gpu import multiprocessors
from kernels.hopper import barrier, head_tiles, load, store, tma_descriptor

LOG2E = gl.constexpr(1.4426950408889634)
D = gl.constexpr(64)  # head dim
BLOCK_M = gl.constexpr(64)  # queries
BLOCK_N = gl.constexpr(128)  # keys
RATIO = gl.constexpr(2)  # BLOCK_N / BLOCK_M: blocks of queries per block of keys
SLOTS = gl.constexpr(4)  # for blocks of queries
SLOTS_KV = gl.constexpr(2)  # for blocks of keys
TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # (128, 64): scores, dk and dv
DQ = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # (64, 64)
# dq in memory: four elements of a thread, then four of the next thread, for 256 threads
FLAT = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 8, 1], [2, 1, 0]))


@gluon.jit
def _produce(
    q, k, v, dout, lse_delta, q_slots, k_slots, v_slots, dout_slots, lse_delta_slots,
    full, empty, full_kv, empty_kv, heads, Hkv, T, GROUP: gl.constexpr,
):  # fmt: skip
    key_blocks = gl.cdiv(T, BLOCK_N)
    query_blocks = key_blocks * RATIO
    # How many tiles and how many blocks of keys were loaded so far. They give the slot and the phase of its barriers
    tile, block_kv = 0, 0
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        b, h_kv = head // Hkv, head % Hkv
        for j in range(key_blocks):
            slot_kv = block_kv % SLOTS_KV
            mbarrier.wait(empty_kv.index(slot_kv), block_kv // SLOTS_KV & 1 ^ 1)
            mbarrier.expect(full_kv.index(slot_kv), 2 * BLOCK_N * D * 2)
            load(k, [b, h_kv, j * BLOCK_N, 0], full_kv.index(slot_kv), k_slots.index(slot_kv))
            load(v, [b, h_kv, j * BLOCK_N, 0], full_kv.index(slot_kv), v_slots.index(slot_kv))
            block_kv += 1
            for member in range(GROUP):
                h = h_kv * GROUP + member
                for i in range(j * RATIO, query_blocks):
                    slot = tile % SLOTS
                    mbarrier.wait(empty.index(slot), tile // SLOTS & 1 ^ 1)
                    mbarrier.expect(full.index(slot), 2 * BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
                    load(q, [b, h, i * BLOCK_M, 0], full.index(slot), q_slots.index(slot))
                    offset = ((b * Hkv * GROUP + h) * query_blocks + i) * (2 * BLOCK_M)
                    load(lse_delta, [offset], full.index(slot), lse_delta_slots.index(slot))
                    load(dout, [b, h, i * BLOCK_M, 0], full.index(slot), dout_slots.index(slot))
                    tile += 1


@gluon.jit
def _start_matmul(k_or_v, q_or_dout):
    """Start k_or_v (BLOCK_N, D) x q_or_dout^T (D, BLOCK_M) on the tensor cores. The caller waits for the result."""
    unused = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, TILE)
    return warpgroup_mma(k_or_v, q_or_dout.permute((1, 0)), unused, use_acc=False, is_async=True)


@gluon.jit
def _opaque(x):
    """Return x, but hide its value from LLVM.

    If LLVM knows the value, it computes the addresses that depend on x before the loop and keeps them in 40 registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _compute_tile(
    s, dk_sum, dv_sum, tile, shared, slot_kv, dq, sums_ptr, b, h, i, j, query_blocks, scale, DIAGONAL: gl.constexpr
):
    """Add a tile to the sums of dk, dv and dq: the keys of block j and the queries of block i.

    Takes s of this tile and the tile's number. Returns s of the next tile, the sums of dk and dv, and tile + 1. If
    DIAGONAL, the tile is on the diagonal and completes dq.
    """
    k_slots, v_slots, q_slots, dout_slots, lse_delta_slots, ds_smem, dq_smem, full, empty = shared
    dtype: gl.constexpr = dq.dtype
    factor_layout: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    query_layout: gl.constexpr = gl.SliceLayout(0, TILE)
    part = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, FLAT)))
    thread = gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(2, FLAT)))
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, FLAT)))
    sums_ptr += i * (BLOCK_M * D)
    sums_ptr += part[:, None, None] * 1024 + thread[None, :, None] * 4 + number[None, None, :]

    slot_kv = _opaque(slot_kv)
    k, v = k_slots.index(slot_kv).reshape([BLOCK_N, D]), v_slots.index(slot_kv).reshape([BLOCK_N, D])
    slot = tile % SLOTS
    q, dout = q_slots.index(slot).reshape([BLOCK_M, D]), dout_slots.index(slot).reshape([BLOCK_M, D])
    dp = _start_matmul(v, dout)
    if DIAGONAL:
        key = j * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, TILE))
        query = i * BLOCK_M + gl.arange(0, BLOCK_M, query_layout)
        s = gl.where(key[:, None] <= query[None, :], s, -float("inf"))
    lse = lse_delta_slots.index(slot).slice(0, BLOCK_M).load(query_layout)
    p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
    p_factor = gl.convert_layout(p.to(dtype), factor_layout, assert_trivial=True)
    dv_sum = warpgroup_mma(p_factor, dout, dv_sum, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = lse_delta_slots.index(slot).slice(BLOCK_M, BLOCK_M).load(query_layout)
    ds = (p * (dp - delta[None, :])).to(dtype)
    ds_smem.store(ds)
    fence_async_shared()  # the tensor cores will read ds
    dq_sum = gl.load(sums_ptr, mask=j > 0, other=0.0)
    dq_sum = dq_sum.reshape(4, 2, 4, 8, 4, 2, 2).permute(2, 5, 3, 1, 0, 4, 6).reshape(BLOCK_M, D)
    dq_sum = gl.convert_layout(dq_sum, DQ, assert_trivial=True)
    barrier()
    ds_factor = gl.convert_layout(ds, factor_layout, assert_trivial=True)
    dk_sum = warpgroup_mma(ds_factor, q, dk_sum, is_async=True)
    dq_sum = warpgroup_mma(ds_smem.permute((1, 0)), k, dq_sum, is_async=True)
    tile += 1
    next_slot = tile % SLOTS
    # s after the last tile of a head is not used, so its slot need not be full
    mbarrier.wait(full.index(next_slot), tile // SLOTS & 1, pred=i + 1 < query_blocks)
    s = _start_matmul(k, q_slots.index(next_slot).reshape([BLOCK_M, D]))
    dq_sum, dk_sum, dv_sum = warpgroup_mma_wait(1, deps=(dq_sum, dk_sum, dv_sum))
    mbarrier.arrive(empty.index(slot))
    if DIAGONAL:
        tma.store_wait(0)  # wait until the previous store has read dq_smem
        dq_smem.reshape([BLOCK_M, D]).store((dq_sum * scale).to(dtype))
        fence_async_shared()
        barrier()  # every thread has passed its fence before one thread stores
        store(dq, [b, h, i * BLOCK_M, 0], dq_smem)
    else:
        flat = dq_sum.reshape(4, 2, 8, 2, 4, 4, 2).permute(4, 3, 0, 2, 5, 1, 6).reshape(4, 256, 4)
        gl.store(sums_ptr, gl.convert_layout(flat, FLAT, assert_trivial=True))
    s = warpgroup_mma_wait(0, deps=(s,))
    return s, dk_sum, dv_sum, tile


@gluon.jit
def _consume(
    dq, dk, dv, sums_ptr, q_slots, k_slots, v_slots, dout_slots, lse_delta_slots, ds_smem, dq_smem, grads_smem,
    full, empty, full_kv, empty_kv, scale, heads, Hkv, T, GROUP: gl.constexpr,
):  # fmt: skip
    shared = k_slots, v_slots, q_slots, dout_slots, lse_delta_slots, ds_smem, dq_smem, full, empty
    key_blocks = gl.cdiv(T, BLOCK_N)
    query_blocks = key_blocks * RATIO
    sums_ptr += gl.program_id(0).to(gl.int64) * (GROUP * query_blocks * BLOCK_M * D)
    tile, block_kv = 0, 0
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        b, h_kv = head // Hkv, head % Hkv
        for j in range(key_blocks):
            slot_kv = block_kv % SLOTS_KV
            mbarrier.wait(full_kv.index(slot_kv), block_kv // SLOTS_KV & 1)
            k = k_slots.index(slot_kv).reshape([BLOCK_N, D])
            dk_sum = gl.zeros((BLOCK_N, D), gl.float32, TILE)
            dv_sum = gl.zeros((BLOCK_N, D), gl.float32, TILE)
            for member in range(GROUP):
                h = h_kv * GROUP + member
                head_sums_ptr = sums_ptr + member * query_blocks * (BLOCK_M * D)
                mbarrier.wait(full.index(tile % SLOTS), tile // SLOTS & 1)
                s = _start_matmul(k, q_slots.index(tile % SLOTS).reshape([BLOCK_M, D]))
                s = warpgroup_mma_wait(0, deps=(s,))
                for i in gl.static_range(RATIO):
                    s, dk_sum, dv_sum, tile = _compute_tile(
                        s, dk_sum, dv_sum, tile, shared, slot_kv, dq, head_sums_ptr, b, h, j * RATIO + i, j,
                        query_blocks, scale, DIAGONAL=True,
                    )  # fmt: skip
                for i in range(j * RATIO + RATIO, query_blocks):
                    s, dk_sum, dv_sum, tile = _compute_tile(
                        s, dk_sum, dv_sum, tile, shared, slot_kv, dq, head_sums_ptr, b, h, i, j,
                        query_blocks, scale, DIAGONAL=False,
                    )  # fmt: skip
            mbarrier.arrive(empty_kv.index(slot_kv))
            tma.store_wait(0)
            grads_smem.index(0).reshape([BLOCK_N, D]).store((dk_sum * scale).to(dk.dtype))
            grads_smem.index(1).reshape([BLOCK_N, D]).store(dv_sum.to(dv.dtype))
            fence_async_shared()
            barrier()
            store(dk, [b, h_kv, j * BLOCK_N, 0], grads_smem.index(0))
            store(dv, [b, h_kv, j * BLOCK_N, 0], grads_smem.index(1))
            block_kv += 1
    tma.store_wait(0)  # the program must not end while a store still reads its shared memory


@gluon.jit(do_not_specialize=["heads", "Hkv", "T"])
def _attention_bwd_gluon_kernel(
    q, k, v, dout, dq, dk, dv, lse_delta, sums_ptr, scale, heads, Hkv, T, GROUP: gl.constexpr
):
    """Compute dq, dk and dv of all heads.

    q, dout and dq are descriptors of (B, H, T, D) tensors; k, v, dk and dv of (B, Hkv, T, D) tensors. lse_delta is a
    descriptor of what _lse_delta_kernel writes. sums_ptr points to fp32 memory for the running sums of dq. `heads` is
    B Hkv.
    """
    dtype: gl.constexpr = q.dtype
    q_slots = gl.allocate_shared_memory(dtype, [SLOTS] + q.block_type.shape, q.layout)  # noqa: RUF005
    dout_slots = gl.allocate_shared_memory(dtype, [SLOTS] + q.block_type.shape, q.layout)  # noqa: RUF005
    k_slots = gl.allocate_shared_memory(dtype, [SLOTS_KV] + k.block_type.shape, k.layout)  # noqa: RUF005
    v_slots = gl.allocate_shared_memory(dtype, [SLOTS_KV] + k.block_type.shape, k.layout)  # noqa: RUF005
    lse_delta_slots = gl.allocate_shared_memory(gl.float32, [SLOTS] + lse_delta.block_type.shape, lse_delta.layout)  # noqa: RUF005
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    ds_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], layout)
    dq_smem = gl.allocate_shared_memory(dtype, q.block_type.shape, q.layout)
    grads_smem = gl.allocate_shared_memory(dtype, [2] + k.block_type.shape, k.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_kv = gl.allocate_shared_memory(gl.int64, [SLOTS_KV, 1], mbarrier.MBarrierLayout())
    empty_kv = gl.allocate_shared_memory(gl.int64, [SLOTS_KV, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SLOTS_KV):
        mbarrier.init(full_kv.index(i), count=1)
        mbarrier.init(empty_kv.index(i), count=1)
    fence_async_shared()  # TMA will count bytes in the barriers
    barrier()
    gl.warp_specialize(
        [
            (_consume, (
                dq, dk, dv, sums_ptr, q_slots, k_slots, v_slots, dout_slots, lse_delta_slots, ds_smem, dq_smem,
                grads_smem, full, empty, full_kv, empty_kv, scale, heads, Hkv, T, GROUP,
            )),
            (_produce, (
                q, k, v, dout, lse_delta, q_slots, k_slots, v_slots, dout_slots, lse_delta_slots,
                full, empty, full_kv, empty_kv, heads, Hkv, T, GROUP,
            )),
        ],
        [1],  # warps of the producer
        [24],  # registers per thread of the producer
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride", "T", "H", "blocks"])
def _lse_delta_kernel(
    dout_ptr,  # (B, T, H, D); out has the same shape
    out_ptr,
    lse_ptr,  # (B H, T) fp32; `stride` is the distance from one head to the next
    lse_delta_ptr,  # (B H, blocks, 2, BLOCK_M) fp32: lse and delta of each block of queries
    stride,
    T,
    H,
    blocks,
):
    """Compute delta, and write lse and delta of each block of queries side by side, with 0 beyond the last query."""
    h, i, b = tl.program_id(0) % H, tl.program_id(0) // H % blocks, tl.program_id(0) // H // blocks
    row, d = i * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    offsets = ((tl.cast(b, tl.int64) * T + row) * H + h)[:, None] * D + d[None, :]
    in_bounds = row < T
    dout = tl.load(dout_ptr + offsets, in_bounds[:, None], other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offsets, in_bounds[:, None], other=0.0).to(tl.float32)
    head = tl.cast(b * H + h, tl.int64)
    lse = tl.load(lse_ptr + head * stride + row, in_bounds, other=0.0)
    lse_delta_ptr += (head * blocks + i) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(lse_delta_ptr, lse)
    tl.store(lse_delta_ptr + BLOCK_M, tl.sum(dout * out, 1))


DTYPES = (torch.bfloat16, torch.float16)


def supports(q: Tensor, k: Tensor, causal: bool, starts: Tensor | None, window: int | None) -> bool:
    """Return whether backward() supports these inputs and is faster here than the two kernels of _triton_backward.py.

    This needs Hopper, a 16-bit dtype, causal attention over whole sequences, a dq that fits in the L2, and enough heads
    to keep the multiprocessors busy. In a round each of 132 programs computes one key head, and all programs take
    equally long. For example, 384 heads take three rounds, which are 97% full; 90% is enough.
    """
    (B, T, H, head_dim), (_, keys, Hkv, _) = q.shape, k.shape
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9 or q.dtype not in DTYPES:
        return False
    if not causal or starts is not None or window is not None or keys != T:
        return False
    if head_dim != D.value or H // Hkv * T > 1024:
        return False
    programs = multiprocessors(q.device)
    return B * Hkv >= 0.9 * triton.cdiv(B * Hkv, programs) * programs


def backward(dout, q, k, v, out, lse, scale, dq, dk, dv) -> None:
    """Compute the gradients and write them to dq (B, T, H, D), dk and dv (B, T, Hkv, D).

    supports() must be true, and can_use_tma() for q, k, v, dout, dq, dk and dv. dout and out must be contiguous.
    """
    (B, T, H, _), Hkv, M, N = q.shape, k.shape[2], BLOCK_M.value, BLOCK_N.value
    blocks = triton.cdiv(T, N) * RATIO.value  # blocks of queries in a sequence
    lse_delta = torch.empty(B * H * blocks * 2 * M, dtype=torch.float32, device=q.device)
    _lse_delta_kernel[(B * H * blocks,)](dout, out, lse, lse_delta, lse.stride(1), T, H, blocks)
    programs = min(B * Hkv, multiprocessors(q.device))
    sums = torch.empty(programs, H // Hkv, blocks * M, D.value, dtype=torch.float32, device=q.device)
    _attention_bwd_gluon_kernel[(programs,)](
        head_tiles(q, M),
        head_tiles(k, N),
        head_tiles(v, N),
        head_tiles(dout, M),
        head_tiles(dq, M),
        head_tiles(dk, N),
        head_tiles(dv, N),
        tma_descriptor(lse_delta, 2 * M),
        sums,
        scale,
        B * Hkv,
        Hkv,
        T,
        GROUP=H // Hkv,
        num_warps=8,
        # Registers per thread when 12 warps start. The producer's warpgroup then gives most of its own to the consumers
        maxnreg=168,
    )
