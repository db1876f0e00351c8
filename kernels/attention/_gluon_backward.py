"""The backward of triton.py for Hopper, in Gluon: five products instead of seven, and dq is added up by one program.

Keys down and queries across, a tile costs five products, each with a factor that was just formed:

    s = k q^T    p = exp2(s - lse)    dp = v dout^T    ds = p (dp - delta)    dv += p dout    dk += ds q    dq += ds^T k

dk and dv of a block of keys stay in registers while queries go by. dq, which each block of keys adds to, does not: so
a program takes all of a head, one block of keys after another, and adds to dq in fp32 in memory of its own. No other
program is there to wait for, the order is fixed, and every thread reads what itself has written, in an order of
addresses that is its registers'. A head's first block of keys stores, later ones add, and the diagonal's, the last one
that a query sees, writes dq.

For a tile of 128 keys and 64 queries a multiprocessor does 1280 clocks of products and 512 of exponentials, and 32 KB
of dq go to and fro: through the L2, as long as that has room for the 256 T bytes a program, half of which are in use on
average: 17 MB of the 50 of an H200 at T = 1024. There, in one run over B sequences of 12 heads,

    B = 64, T = 1024    0.94 ms, and with the two kernels 1.09
    B = 22, T = 2048    1.23 ms, and with the two kernels 1.24

Heads of 128 channels spill, and took longer: 1.29 ms, where the two kernels took 1.06.

In 227 KB of shared memory there is room for one program a multiprocessor:

    producer     one warp, which fetches by TMA k and v of a block, two blocks at a time, and q, dout, lse and delta of
                 the queries' blocks into a ring of four slots
    consumers    two warpgroups, of 64 keys each; for dq, of 32 channels each, so they pass ds to each other in shared
                 memory, and meet when it is there and when it has been read

Products run on while their warps do something else: dp while p is formed, dv while ds is, the next tile's s while dq is
stored. p and ds are first factors straight from registers. A barrier a slot says that it is full (its bytes have
landed), another that it is empty, as in mlp/_gluon.py.

Beyond the last query all that TMA fetches is 0, lse and delta too: p is 1 there, and what it is multiplied by 0. Beyond
the last key the causal mask hides the keys from every real query. TMA's stores clip.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gpu import processors
from kernels.hopper import barrier, described, load, store

LOG2E = gl.constexpr(1.4426950408889634)
D = gl.constexpr(64)  # of a head
BLOCK_M = gl.constexpr(64)  # queries
BLOCK_N = gl.constexpr(128)  # keys
RATIO = gl.constexpr(2)  # of the two
STAGES = gl.constexpr(4)
STAGES_KV = gl.constexpr(2)
TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # (128, 64): scores, and sums of dk and dv
DQ = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # (64, 64)
# dq in memory: four of a thread's numbers in a row, then those of the next of 256 threads
FLAT = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 8, 1], [2, 1, 0]))


@gluon.jit
def _produce(
    q, k, v, dout, numbers, qs, ks, vs, douts, ns, full, empty, full_kv, empty_kv, heads, Hkv, T, GROUP: gl.constexpr
):  # fmt: skip
    columns = gl.cdiv(T, BLOCK_N)
    rows = columns * RATIO
    at, at_kv = 0, 0  # tiles and blocks of keys so far
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        b, h_kv = head // Hkv, head % Hkv
        for j in range(columns):
            stage = at_kv % STAGES_KV
            mbarrier.wait(empty_kv.index(stage), at_kv // STAGES_KV & 1 ^ 1)
            mbarrier.expect(full_kv.index(stage), 2 * BLOCK_N * D * 2)
            load(k, [b, h_kv, j * BLOCK_N, 0], full_kv.index(stage), ks.index(stage))
            load(v, [b, h_kv, j * BLOCK_N, 0], full_kv.index(stage), vs.index(stage))
            at_kv += 1
            for member in range(GROUP):
                h = h_kv * GROUP + member
                for i in range(j * RATIO, rows):
                    stage = at % STAGES
                    mbarrier.wait(empty.index(stage), at // STAGES & 1 ^ 1)
                    mbarrier.expect(full.index(stage), 2 * BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
                    load(q, [b, h, i * BLOCK_M, 0], full.index(stage), qs.index(stage))
                    place = ((b * Hkv * GROUP + h) * rows + i) * (2 * BLOCK_M)
                    load(numbers, [place], full.index(stage), ns.index(stage))
                    load(dout, [b, h, i * BLOCK_M, 0], full.index(stage), douts.index(stage))
                    at += 1


@gluon.jit
def _scores(keys, queries):
    nothing = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, TILE)
    return warpgroup_mma(keys, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _opaque(x):
    """x. But not to LLVM, which moves what follows from it out of the loop: 40 registers of operands' addresses."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tile(s, sum_k, sum_v, at, shared, slot, dq, sums_ptr, b, h, i, j, rows, scale, DIAGONAL: gl.constexpr):
    """s of tile `at` -> that of the next, the sums of dk and dv, at + 1."""
    ks, vs, qs, douts, ns, ds_at, dq_at, full, empty = shared
    dtype: gl.constexpr = dq.dtype
    factor: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    across: gl.constexpr = gl.SliceLayout(0, TILE)
    part = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, FLAT)))
    thread = gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(2, FLAT)))
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, FLAT)))
    sums_ptr += i * (BLOCK_M * D)
    sums_ptr += part[:, None, None] * 1024 + thread[None, :, None] * 4 + four[None, None, :]

    slot = _opaque(slot)
    k, v = ks.index(slot).reshape([BLOCK_N, D]), vs.index(slot).reshape([BLOCK_N, D])
    stage = at % STAGES
    q, dout = qs.index(stage).reshape([BLOCK_M, D]), douts.index(stage).reshape([BLOCK_M, D])
    dp = _scores(v, dout)
    if DIAGONAL:
        key = j * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, TILE))
        query = i * BLOCK_M + gl.arange(0, BLOCK_M, across)
        s = gl.where(key[:, None] <= query[None, :], s, -float("inf"))
    lse = ns.index(stage).slice(0, BLOCK_M).load(across)
    p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
    p_factor = gl.convert_layout(p.to(dtype), factor, assert_trivial=True)
    sum_v = warpgroup_mma(p_factor, dout, sum_v, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = ns.index(stage).slice(BLOCK_M, BLOCK_M).load(across)
    ds = (p * (dp - delta[None, :])).to(dtype)
    ds_at.store(ds)
    fence_async_shared()  # the tensor cores will read it
    before = gl.load(sums_ptr, mask=j > 0, other=0.0)
    before = before.reshape(4, 2, 4, 8, 4, 2, 2).permute(2, 5, 3, 1, 0, 4, 6).reshape(BLOCK_M, D)
    before = gl.convert_layout(before, DQ, assert_trivial=True)
    barrier()
    ds_factor = gl.convert_layout(ds, factor, assert_trivial=True)
    sum_k = warpgroup_mma(ds_factor, q, sum_k, is_async=True)
    sum_q = warpgroup_mma(ds_at.permute((1, 0)), k, before, is_async=True)
    at += 1
    after = at % STAGES
    mbarrier.wait(full.index(after), at // STAGES & 1, pred=i + 1 < rows)  # the last one's s is of no use
    s = _scores(k, qs.index(after).reshape([BLOCK_M, D]))
    sum_q, sum_k, sum_v = warpgroup_mma_wait(1, deps=(sum_q, sum_k, sum_v))
    mbarrier.arrive(empty.index(stage))
    if DIAGONAL:
        tma.store_wait(0)  # until dq_at has been read
        dq_at.reshape([BLOCK_M, D]).store((sum_q * scale).to(dtype))
        fence_async_shared()
        barrier()  # every thread's fence, before the one that stores
        store(dq, [b, h, i * BLOCK_M, 0], dq_at)
    else:
        so_far = sum_q.reshape(4, 2, 8, 2, 4, 4, 2).permute(4, 3, 0, 2, 5, 1, 6).reshape(4, 256, 4)
        gl.store(sums_ptr, gl.convert_layout(so_far, FLAT, assert_trivial=True))
    s = warpgroup_mma_wait(0, deps=(s,))
    return s, sum_k, sum_v, at


@gluon.jit
def _consume(
    dq, dk, dv, sums_ptr, qs, ks, vs, douts, ns, ds_at, dq_at, grads_at, full, empty, full_kv, empty_kv,
    scale, heads, Hkv, T, GROUP: gl.constexpr,
):  # fmt: skip
    shared = ks, vs, qs, douts, ns, ds_at, dq_at, full, empty
    columns = gl.cdiv(T, BLOCK_N)
    rows = columns * RATIO
    sums_ptr += gl.program_id(0).to(gl.int64) * (GROUP * rows * BLOCK_M * D)
    at, at_kv = 0, 0
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        b, h_kv = head // Hkv, head % Hkv
        for j in range(columns):
            slot = at_kv % STAGES_KV
            mbarrier.wait(full_kv.index(slot), at_kv // STAGES_KV & 1)
            k = ks.index(slot).reshape([BLOCK_N, D])
            sum_k = gl.zeros((BLOCK_N, D), gl.float32, TILE)
            sum_v = gl.zeros((BLOCK_N, D), gl.float32, TILE)
            for member in range(GROUP):
                h = h_kv * GROUP + member
                head_sums_ptr = sums_ptr + member * rows * (BLOCK_M * D)
                mbarrier.wait(full.index(at % STAGES), at // STAGES & 1)
                s = _scores(k, qs.index(at % STAGES).reshape([BLOCK_M, D]))
                s = warpgroup_mma_wait(0, deps=(s,))
                for i in gl.static_range(RATIO):
                    s, sum_k, sum_v, at = _tile(
                        s, sum_k, sum_v, at, shared, slot, dq, head_sums_ptr, b, h, j * RATIO + i, j, rows, scale, True
                    )
                for i in range(j * RATIO + RATIO, rows):
                    s, sum_k, sum_v, at = _tile(
                        s, sum_k, sum_v, at, shared, slot, dq, head_sums_ptr, b, h, i, j, rows, scale, False
                    )
            mbarrier.arrive(empty_kv.index(slot))
            tma.store_wait(0)
            grads_at.index(0).reshape([BLOCK_N, D]).store((sum_k * scale).to(dk.dtype))
            grads_at.index(1).reshape([BLOCK_N, D]).store(sum_v.to(dv.dtype))
            fence_async_shared()
            barrier()
            store(dk, [b, h_kv, j * BLOCK_N, 0], grads_at.index(0))
            store(dv, [b, h_kv, j * BLOCK_N, 0], grads_at.index(1))
            at_kv += 1
    tma.store_wait(0)  # shared memory lives no longer than the program


@gluon.jit(do_not_specialize=["heads", "Hkv", "T"])
def _attention_bwd_gluon_kernel(
    q, k, v, dout, dq, dk, dv, numbers, sums_ptr, scale, heads, Hkv, T, GROUP: gl.constexpr
):
    """Descriptors of q, dout, dq (B, H, T, D), k, v, dk, dv (B, Hkv, T, D), and numbers; sums_ptr: fp32."""
    dtype: gl.constexpr = q.dtype
    qs = gl.allocate_shared_memory(dtype, [STAGES] + q.block_type.shape, q.layout)  # noqa: RUF005
    douts = gl.allocate_shared_memory(dtype, [STAGES] + q.block_type.shape, q.layout)  # noqa: RUF005
    ks = gl.allocate_shared_memory(dtype, [STAGES_KV] + k.block_type.shape, k.layout)  # noqa: RUF005
    vs = gl.allocate_shared_memory(dtype, [STAGES_KV] + k.block_type.shape, k.layout)  # noqa: RUF005
    ns = gl.allocate_shared_memory(gl.float32, [STAGES] + numbers.block_type.shape, numbers.layout)  # noqa: RUF005
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    ds_at = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], layout)
    dq_at = gl.allocate_shared_memory(dtype, q.block_type.shape, q.layout)
    grads_at = gl.allocate_shared_memory(dtype, [2] + k.block_type.shape, k.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_kv = gl.allocate_shared_memory(gl.int64, [STAGES_KV, 1], mbarrier.MBarrierLayout())
    empty_kv = gl.allocate_shared_memory(gl.int64, [STAGES_KV, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STAGES_KV):
        mbarrier.init(full_kv.index(i), count=1)
        mbarrier.init(empty_kv.index(i), count=1)
    fence_async_shared()  # TMA will count bytes in them
    barrier()
    gl.warp_specialize(
        [
            (_consume, (
                dq, dk, dv, sums_ptr, qs, ks, vs, douts, ns, ds_at, dq_at, grads_at, full, empty, full_kv, empty_kv,
                scale, heads, Hkv, T, GROUP,
            )),
            (_produce, (
                q, k, v, dout, numbers, qs, ks, vs, douts, ns, full, empty, full_kv, empty_kv, heads, Hkv, T, GROUP,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride", "T", "H", "blocks"])
def _numbers_kernel(
    dout_ptr,  # (B, T, H, D), and so is out
    out_ptr,
    lse_ptr,  # (B H, T), of this stride
    numbers_ptr,  # (B H, blocks, 2, BLOCK_M)
    stride,
    T,
    H,
    blocks,
):
    """lse and delta, a block of queries after another, 0 beyond the last query."""
    h, i, b = tl.program_id(0) % H, tl.program_id(0) // H % blocks, tl.program_id(0) // H // blocks
    row, d = i * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    at = ((tl.cast(b, tl.int64) * T + row) * H + h)[:, None] * D + d[None, :]
    here = row < T
    dout = tl.load(dout_ptr + at, here[:, None], other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, here[:, None], other=0.0).to(tl.float32)
    head = tl.cast(b * H + h, tl.int64)
    lse = tl.load(lse_ptr + head * stride + row, here, other=0.0)
    numbers_ptr += (head * blocks + i) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(numbers_ptr, lse)
    tl.store(numbers_ptr + BLOCK_M, tl.sum(dout * out, 1))


DTYPES = (torch.bfloat16, torch.float16)


def takes(q: Tensor, k: Tensor, causal: bool, starts: Tensor | None, window: int | None) -> bool:
    """Whether it can, and is faster: Hopper, 16 bits, whole sequences, dq in the L2, and multiprocessors that are busy.

    A head of k is a program's work, and all last as long: 384 are three rounds of 132 programs, 97 % of them full.
    """
    (B, T, H, width), (_, keys, Hkv, _) = q.shape, k.shape
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9 or q.dtype not in DTYPES:
        return False
    if not causal or starts is not None or window is not None or keys != T or width != D.value or H // Hkv * T > 1024:
        return False
    programs = processors(q.device)
    return B * Hkv >= 0.9 * triton.cdiv(B * Hkv, programs) * programs


def _heads(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of a head of (B, T, H, D)."""
    return described(tensor.transpose(1, 2), 1, 1, rows, D.value)


def backward(dout, q, k, v, out, lse, scale, dq, dk, dv) -> None:
    """Writes dq, dk and dv. TMA fetches and stores what it gets, all of it by_tma(); dout and out are contiguous."""
    (B, T, H, _), Hkv, M, N = q.shape, k.shape[2], BLOCK_M.value, BLOCK_N.value
    blocks = triton.cdiv(T, N) * RATIO.value  # of queries
    numbers = torch.empty(B * H * blocks * 2 * M, dtype=torch.float32, device=q.device)
    _numbers_kernel[(B * H * blocks,)](dout, out, lse, numbers, lse.stride(1), T, H, blocks)
    programs = min(B * Hkv, processors(q.device))
    sums = torch.empty(programs, H // Hkv, blocks * M, D.value, dtype=torch.float32, device=q.device)
    _attention_bwd_gluon_kernel[(programs,)](
        _heads(q, M),
        _heads(k, N),
        _heads(v, N),
        _heads(dout, M),
        _heads(dq, M),
        _heads(dk, N),
        _heads(dv, N),
        described(numbers, 2 * M),
        sums,
        scale,
        B * Hkv,
        Hkv,
        T,
        GROUP=H // Hkv,
        num_warps=8,
        maxnreg=168,  # of 12 warps at the start; the producer's warpgroup then hands most of its own to the consumers
    )
