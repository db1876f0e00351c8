"""The backward of triton.py for Hopper, in Gluon: five products instead of seven, and dq is added up by one program.

Keys down and queries across, a tile of 128 x 128 costs five products, every one with a factor that was just formed:

    s = k q^T    p = exp2(s - lse)    dp = v dout^T    ds = p (dp - delta)    dv += p dout    dk += ds q    dq += ds^T k

dk and dv of a block of keys stay in registers while queries go by. dq, which each block of keys adds to, does not: so
a program takes all of a head, one block of keys after another, and adds to dq in fp32 in memory of its own. No other
program is there to wait for, the order is fixed, and every thread reads what itself has written, in an order of
addresses that is its registers'. 64 KB a tile go to and fro, but T x D x 4 = 256 KB a program stay in the L2. A head's
first block of keys stores, later ones add, and the last one that a query sees (causal: the diagonal's) writes dq.

A multiprocessor does 2560 clocks of products a tile of 128 x 128 x 64, 1024 of exponentials, and in 227 KB of shared
memory there is room for one program:

    producer     one warp, which fetches by TMA k and v of a block, two blocks at a time, and q, dout, lse and delta of
                 the queries' blocks into a ring
    consumers    two warpgroups, of 64 keys each; for dq, of 64 queries each, so they pass ds to each other in shared
                 memory, the tile's one meeting

Products run on while their warps do something else: dp while p is formed, dv while ds is, dk while dq's sum so far is
fetched. p and ds are first factors straight from registers. A barrier a slot says that it is full (its bytes have
landed), another that it is empty, as in mlp/_gluon.py.

Beyond the last query all that TMA fetches is 0, lse and delta too: p is 1 there, and what it is multiplied by 0. Beyond
the last key a causal mask hides the keys from every real query. TMA's stores clip.
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

# later versions renamed these
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _produce(
    q, k, v, dout, numbers, qs, ks, vs, douts, ns, full, empty, full_kv, empty_kv, heads, Hkv, T,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = qs.shape[0]
    STAGES_KV: gl.constexpr = ks.shape[0]
    D: gl.constexpr = q.block_type.shape[3]
    columns = gl.cdiv(T, BLOCK_N)
    rows = columns * (BLOCK_N // BLOCK_M)
    at, at_kv = 0, 0  # tiles and blocks of keys so far
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        b, h_kv = head // Hkv, head % Hkv
        for j in range(columns):
            stage = at_kv % STAGES_KV
            mbarrier.wait(empty_kv.index(stage), at_kv // STAGES_KV & 1 ^ 1)
            mbarrier.expect(full_kv.index(stage), 2 * BLOCK_N * D * 2)
            _load(k, [b, h_kv, j * BLOCK_N, 0], full_kv.index(stage), ks.index(stage))
            _load(v, [b, h_kv, j * BLOCK_N, 0], full_kv.index(stage), vs.index(stage))
            at_kv += 1
            for member in range(GROUP):
                h = h_kv * GROUP + member
                for i in range(j * (BLOCK_N // BLOCK_M) if CAUSAL else 0, rows):
                    stage = at % STAGES
                    mbarrier.wait(empty.index(stage), at // STAGES & 1 ^ 1)
                    mbarrier.expect(full.index(stage), 2 * BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
                    _load(q, [b, h, i * BLOCK_M, 0], full.index(stage), qs.index(stage))
                    place = ((b * Hkv * GROUP + h) * rows + i) * (2 * BLOCK_M)
                    _load(numbers, [place], full.index(stage), ns.index(stage))
                    _load(dout, [b, h, i * BLOCK_M, 0], full.index(stage), douts.index(stage))
                    at += 1


@gluon.jit
def _scores(keys, queries, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    nothing = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout)
    return warpgroup_mma(keys, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _opaque(x):
    """x. But not to LLVM, which moves what follows from it out of the loop: 40 registers of operands' addresses."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tile(
    s, sum_k, sum_v, slot, ks, vs, qs, douts, ns, ds_at, dq_at, full, empty, dq, sums_ptr, b, h, i, j, more, T, at,
    scale, last, MASK: gl.constexpr, CAUSAL: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = qs.shape[0]
    D: gl.constexpr = ks.shape[4]
    BLOCK_N: gl.constexpr = ks.shape[3]
    BLOCK_M: gl.constexpr = ds_at.shape[1]
    dtype: gl.constexpr = dq.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    grads: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, grads, 2)
    across: gl.constexpr = gl.SliceLayout(0, scores)
    # dq: 8 warps over rows of 16; of 64 rows, each warp has half of the columns
    WIDE: gl.constexpr = 128 // BLOCK_M
    own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8 // WIDE, WIDE], [16, D // WIDE, 16])
    # and in memory: four of a thread's numbers in a row, then those of the next of 256 threads
    PARTS: gl.constexpr = BLOCK_M * D // 1024
    flat: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 8, 1], [2, 1, 0])
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, flat)))
    thread = gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(2, flat)))
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, flat)))
    sums_ptr += part[:, None, None] * 1024 + thread[None, :, None] * 4 + four[None, None, :]

    slot = _opaque(slot)
    k, v = ks.index(slot).reshape([BLOCK_N, D]), vs.index(slot).reshape([BLOCK_N, D])
    stage = at % STAGES
    q, dout, numbers = qs.index(stage), douts.index(stage), ns.index(stage)
    q, dout = q.reshape([BLOCK_M, D]), dout.reshape([BLOCK_M, D])
    if not AHEAD:
        mbarrier.wait(full.index(stage), at // STAGES & 1)
        s = _scores(k, q, BLOCK_N, BLOCK_M)
    dp = _scores(v, dout, BLOCK_N, BLOCK_M)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=(s,))
    if MASK:
        key = j * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores))
        if CAUSAL:
            query = i * BLOCK_M + gl.arange(0, BLOCK_M, across)
            s = gl.where(key[:, None] <= query[None, :], s, -float("inf"))
        else:
            s = gl.where((key < T)[:, None], s, -float("inf"))
    lse = numbers.slice(0, BLOCK_M).load(across)
    p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
    p_factor = gl.convert_layout(p.to(dtype), factor, assert_trivial=True)
    if EARLY:
        sum_v = warpgroup_mma(p_factor, dout, sum_v, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
    else:
        dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = numbers.slice(BLOCK_M, BLOCK_M).load(across)
    ds = (p * (dp - delta[None, :])).to(dtype)
    if not EARLY:
        sum_v = warpgroup_mma(p_factor, dout, sum_v, is_async=True)
    ds_at.store(ds)
    fence_async_shared()  # the tensor cores will read it
    before = gl.load(sums_ptr, mask=j > 0, other=0.0)
    before = before.reshape(D // WIDE // 8, WIDE, 8 // WIDE, 8, 4, 2, 2).permute(2, 5, 3, 1, 0, 4, 6)
    before = gl.convert_layout(before.reshape(BLOCK_M, D), own, assert_trivial=True)
    _barrier()
    ds_factor = gl.convert_layout(ds, factor, assert_trivial=True)
    sum_k = warpgroup_mma(ds_factor, q, sum_k, is_async=True)
    sum_q = warpgroup_mma(ds_at.permute((1, 0)), k, before, is_async=True)
    at += 1
    if AHEAD:
        after = at % STAGES
        mbarrier.wait(full.index(after), at // STAGES & 1, pred=more)
        s = _scores(k, qs.index(after).reshape([BLOCK_M, D]), BLOCK_N, BLOCK_M)
        sum_q, sum_k, sum_v = warpgroup_mma_wait(1, deps=(sum_q, sum_k, sum_v))
    else:
        sum_q, sum_k, sum_v = warpgroup_mma_wait(0, deps=(sum_q, sum_k, sum_v))
    mbarrier.arrive(empty.index(stage))
    if last:
        tma.store_wait(0)  # until dq_at has been read
        dq_at.reshape([BLOCK_M, D]).store((sum_q * scale).to(dtype))
        fence_async_shared()
        _barrier()  # every thread's fence, before the one that stores
        _store(dq, [b, h, i * BLOCK_M, 0], dq_at)
    else:
        so_far = sum_q.reshape(8 // WIDE, 2, 8, WIDE, D // WIDE // 8, 4, 2).permute(4, 3, 0, 2, 5, 1, 6)
        gl.store(sums_ptr, gl.convert_layout(so_far.reshape(PARTS, 256, 4), flat, assert_trivial=True))
    if AHEAD:
        s = warpgroup_mma_wait(0, deps=(s,))
    return s, sum_k, sum_v, at


@gluon.jit
def _consume(
    dq, dk, dv, sums_ptr, qs, ks, vs, douts, ns, ds_at, dq_at, grads_at, full, empty, full_kv, empty_kv,
    scale, heads, Hkv, T,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = qs.shape[0]
    STAGES_KV: gl.constexpr = ks.shape[0]
    BLOCK_N: gl.constexpr = ks.shape[3]
    BLOCK_M: gl.constexpr = qs.shape[3]
    D: gl.constexpr = ks.shape[4]
    RATIO: gl.constexpr = BLOCK_N // BLOCK_M
    dtype: gl.constexpr = dq.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    grads: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    columns = gl.cdiv(T, BLOCK_N)
    rows = columns * RATIO
    sums_ptr += gl.program_id(0).to(gl.int64) * (GROUP * rows * BLOCK_M * D)
    at, at_kv = 0, 0
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        b, h_kv = head // Hkv, head % Hkv
        for j in range(columns):
            stage = at_kv % STAGES_KV
            mbarrier.wait(full_kv.index(stage), at_kv // STAGES_KV & 1)
            slot = stage
            k = ks.index(slot).reshape([BLOCK_N, D])
            sum_k = gl.zeros((BLOCK_N, D), gl.float32, grads)
            sum_v = gl.zeros((BLOCK_N, D), gl.float32, grads)
            for member in range(GROUP):
                h = h_kv * GROUP + member
                head_sums_ptr = sums_ptr + member * rows * (BLOCK_M * D)
                first = 0
                s = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, scores)
                if AHEAD:
                    mbarrier.wait(full.index(at % STAGES), at // STAGES & 1)
                    s = _scores(k, qs.index(at % STAGES).reshape([BLOCK_M, D]), BLOCK_N, BLOCK_M)
                    s = warpgroup_mma_wait(0, deps=(s,))
                if CAUSAL:
                    first = j * RATIO
                    for _ in gl.static_range(RATIO):
                        s, sum_k, sum_v, at = _tile(
                            s, sum_k, sum_v, slot, ks, vs, qs, douts, ns, ds_at, dq_at, full, empty, dq,
                            head_sums_ptr + first * (BLOCK_M * D), b, h, first, j, first + 1 < rows, T, at, scale,
                            True, True, CAUSAL, EARLY, AHEAD,
                        )  # fmt: skip
                        first += 1
                for i in range(first, rows):
                    s, sum_k, sum_v, at = _tile(
                        s, sum_k, sum_v, slot, ks, vs, qs, douts, ns, ds_at, dq_at, full, empty, dq,
                        head_sums_ptr + i * (BLOCK_M * D), b, h, i, j, i + 1 < rows, T, at, scale,
                        False if CAUSAL else j == columns - 1, RAGGED, CAUSAL, EARLY, AHEAD,
                    )  # fmt: skip
            mbarrier.arrive(empty_kv.index(stage))
            tma.store_wait(0)
            grads_at.index(0).reshape([BLOCK_N, D]).store((sum_k * scale).to(dtype))
            grads_at.index(1).reshape([BLOCK_N, D]).store(sum_v.to(dtype))
            fence_async_shared()
            _barrier()
            _store(dk, [b, h_kv, j * BLOCK_N, 0], grads_at.index(0))
            _store(dv, [b, h_kv, j * BLOCK_N, 0], grads_at.index(1))
            at_kv += 1
    tma.store_wait(0)  # shared memory lives no longer than the program


@gluon.jit(do_not_specialize=["heads", "Hkv", "T"])
def _kernel(
    q, k, v, dout, dq, dk, dv, numbers, sums_ptr, scale, heads, Hkv, T,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, STAGES_KV: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
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
    _barrier()
    gl.warp_specialize(
        [
            (_consume, (
                dq, dk, dv, sums_ptr, qs, ks, vs, douts, ns, ds_at, dq_at, grads_at, full, empty, full_kv, empty_kv,
                scale, heads, Hkv, T, GROUP, CAUSAL, RAGGED, EARLY, AHEAD,
            )),
            (_produce, (
                q, k, v, dout, numbers, qs, ks, vs, douts, ns, full, empty, full_kv, empty_kv,
                heads, Hkv, T, GROUP, CAUSAL, BLOCK_M, BLOCK_N,
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
    numbers_ptr,  # (B H, blocks, 2, SIZE)
    stride,
    T,
    H,
    blocks,
    D: tl.constexpr,
    SIZE: tl.constexpr,
):
    """lse and delta, a block of queries after another, 0 beyond the last query."""
    h, i, b = tl.program_id(0) % H, tl.program_id(0) // H % blocks, tl.program_id(0) // H // blocks
    row, d = i * SIZE + tl.arange(0, SIZE), tl.arange(0, D)
    at = ((tl.cast(b, tl.int64) * T + row) * H + h)[:, None] * D + d[None, :]
    here = row < T
    dout = tl.load(dout_ptr + at, here[:, None], other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, here[:, None], other=0.0).to(tl.float32)
    head = tl.cast(b * H + h, tl.int64)
    lse = tl.load(lse_ptr + head * stride + row, here, other=0.0)
    numbers_ptr += (head * blocks + i) * (2 * SIZE) + tl.arange(0, SIZE)
    tl.store(numbers_ptr, lse)
    tl.store(numbers_ptr + SIZE, tl.sum(dout * out, 1))


DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def takes(q: Tensor, k: Tensor, starts: Tensor | None, window: int | None) -> bool:
    """Whether it runs there, and is faster: Hopper, whole sequences, and heads enough to keep the multiprocessors busy.

    A head is a program's work, and all last as long: of 384 heads 132 programs make three rounds, 97 % of them full.
    """
    (_, T, _, D), heads = q.shape, k.shape[0] * k.shape[2]
    if q.device.type != "cuda" or q.dtype not in DTYPES or D not in SIZES or starts is not None or window is not None:
        return False
    if torch.cuda.get_device_capability(q.device)[0] != 9 or k.shape[1] != T:
        return False
    programs = processors(q.device)
    return heads / (triton.cdiv(heads, programs) * programs) >= 0.75


# D -> queries and keys of a tile, slots for each; whether dv += p dout is issued before dp is awaited (EARLY), and the
# next tile's s before this one's dq is (AHEAD)
SIZES = {
    64: {"BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 2, "STAGES_KV": 2, "EARLY": True, "AHEAD": False},
    128: {"BLOCK_M": 64, "BLOCK_N": 128, "STAGES": 2, "STAGES_KV": 1, "EARLY": False, "AHEAD": False},
}


def _described(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Of (B, T, H, D) as (B, H, T, D), or of numbers in a row."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32 if len(block) == 1 else DTYPES[tensor.dtype])
    tensor = tensor if len(block) == 1 else tensor.transpose(1, 2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def backward(dout, q, k, v, out, lse, causal, scale, dq, dk, dv, size: dict | None = None) -> None:
    """Writes dq, dk and dv. TMA fetches and stores what it gets, all of it by_tma(); dout and out are contiguous."""
    (B, T, H, D), Hkv = q.shape, k.shape[2]
    size = SIZES[D] if size is None else size
    M, N = size["BLOCK_M"], size["BLOCK_N"]
    blocks = triton.cdiv(T, N) * (N // M)  # of queries
    numbers = torch.empty(B * H * blocks * 2 * M, dtype=torch.float32, device=q.device)
    _numbers_kernel[(B * H * blocks,)](dout, out, lse, numbers, lse.stride(1), T, H, blocks, D=D, SIZE=M)
    programs = min(B * Hkv, processors(q.device))
    sums = torch.empty(programs, H // Hkv, blocks * M, D, dtype=torch.float32, device=q.device)
    by_queries, by_keys = [1, 1, M, D], [1, 1, N, D]
    _kernel[(programs,)](
        _described(q, by_queries),
        _described(k, by_keys),
        _described(v, by_keys),
        _described(dout, by_queries),
        _described(dq, by_queries),
        _described(dk, by_keys),
        _described(dv, by_keys),
        _described(numbers, [2 * M]),
        sums,
        scale,
        B * Hkv,
        Hkv,
        T,
        GROUP=H // Hkv,
        CAUSAL=causal,
        RAGGED=not causal and T % N > 0,
        **size,
        num_warps=8,
        maxnreg=168,  # of 12 warps at the start; the producer's warpgroup then hands most of its own to the consumers
    )
