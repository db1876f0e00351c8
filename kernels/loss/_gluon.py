"""The loss of triton.py for Hopper, in Gluon: the matmul writes exponentials of the logits, so no logits exist.

_softmax.py reads all logits and writes their gradient, softmax(logits) - onehot(target). At 65,536 tokens and
V = 50,304 that moves 13.2 GB, 3.2 ms at the copy rate of an H200, while the three matmuls take 23 ms. The pass seems
necessary, because a softmax needs the sum of its whole row. But the two matmuls that read the gradient are linear, so
they can read unnormalised exponentials. For dW the sum divides x before the matmul. For dx it divides the product:

    p          = exp(x W^T - shift)     in the epilogue of the matmul, which also sums each row of its tile
    total      = the sum of a row of p
    p[target] -= total                  one number of each row
    dx         = (p W) / total
    dW         = p^T (x / total)

At C = 768, x and dx have 65 times fewer numbers than p. FlashAttention (Dao et al. 2022, arXiv:2205.14135) also
divides last.

The shift of a row must be known before the matmul, so it cannot be the row's maximum. It is the target's logit + ROOM
(in base 2), which is a product of two vectors. Then total is at least 2^-ROOM, and the loss of a row is
log2(total) + ROOM. p is in bf16, which has the range of fp32, so it overflows only if the loss of a row is above
128 + ROOM bits, 110 nats. If a loss is above 77 nats, _cross_entropy_finish_kernel computes its row again with the
row's maximum as shift, and the 15 rows beside it.

The matmul has two consumers that take its tiles in turns: one multiplies while the other exponentiates and stores.
kernels/mlp/_gluon.py explains this schedule and its barriers.
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
    warpgroup_mma_wait,
)

from kernels.gpu import make_context_current, multiprocessors
from kernels.hopper import barrier, exp2, load, multiply_in_turn, split_columns, start_barriers, store, tma_descriptor
from kernels.tiles import place

LOG2E = tl.constexpr(1.4426950408889634)
ROOM = tl.constexpr(32.0)
LARGEST = tl.constexpr(2.0**80)  # of a row's total, so that x / total is far from the smallest number of bf16
BLOCK_N = gl.constexpr(128)  # rows of a tile
BLOCK_V = gl.constexpr(128)  # columns of a tile, words of the vocabulary
BLOCK_C = gl.constexpr(64)  # channels of a k-step
SLICE = gl.constexpr(32)  # columns that are stored at once
BUFFERS = gl.constexpr(2)  # slices of a consumer that may wait to be stored
STAGES = gl.constexpr(6)  # k-steps in shared memory; the kernel takes 224 of the 227 KB
GROUP = gl.constexpr(32)  # tiles of rows that share a tile of W in the L2: 716 TFLOP/s, and 654 with 8


@gluon.jit
def _produce(x, w, xs, ws, full, empty, N, V, C):
    """Load the operands of all tiles of this program, one k-step after another, into a ring of slots."""
    tiles_n, tiles_v = gl.cdiv(N, BLOCK_N), gl.cdiv(V, BLOCK_V)
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), tiles_n * tiles_v, gl.num_programs(0)):
        tile_n, tile_v = place(tile, tiles_n, tiles_v, GROUP)
        for step in range(gl.cdiv(C, BLOCK_C)):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), (BLOCK_N + BLOCK_V) * BLOCK_C * 2)
            load(x, [tile_n * BLOCK_N, step * BLOCK_C], full.index(stage), xs.index(stage))
            load(w, [tile_v * BLOCK_V, step * BLOCK_C], full.index(stage), ws.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr,  # 0 takes the first, third ... tile of the program, 1 takes the others
    xs, ws, p_out, full, empty, turn, p, target_logits_ptr, sums_ptr, N, V, C,
    PARTIAL: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLICE, 16])
    tiles_n, tiles_v, steps = gl.cdiv(N, BLOCK_N), gl.cdiv(V, BLOCK_V), gl.cdiv(C, BLOCK_C)
    programs = gl.num_programs(0)
    position = CONSUMER * steps  # of this tile in the ring
    parity = 0  # 1 if this consumer has computed an odd number of tiles
    for tile in range(gl.program_id(0) + CONSUMER * programs, tiles_n * tiles_v, 2 * programs):
        tile_n, tile_v = place(tile, tiles_n, tiles_v, GROUP)
        n = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, PART))
        shifts = gl.load(target_logits_ptr + n, n < N, other=0.0) + ROOM
        logits = gl.zeros((BLOCK_N, BLOCK_V), gl.float32, TILE)
        logits, last, _, _ = multiply_in_turn(
            logits, xs, ws, full, empty, turn, position, parity, steps, CONSUMER, W_BY_ROWS=True
        )
        mbarrier.arrive(turn.index(1 - CONSUMER))
        logits = warpgroup_mma_wait(0, deps=(logits,))
        mbarrier.arrive(empty.index(last))

        parts = split_columns(logits, BLOCK_V // SLICE, PART)
        sums = gl.zeros((BLOCK_N,), gl.float32, gl.SliceLayout(1, PART))
        for i in gl.static_range(BLOCK_V // SLICE):
            numbers = exp2(parts[i] * LOG2E - shifts[:, None])
            v = tile_v * BLOCK_V + i * SLICE
            if PARTIAL:
                columns = v + gl.arange(0, SLICE, gl.SliceLayout(0, PART))
                numbers = gl.where(columns[None, :] < V, numbers, 0.0)
            sums += gl.sum(numbers, 1)
            buffer = CONSUMER * BUFFERS + i % BUFFERS
            tma.store_wait(BUFFERS - 1)  # until TMA has read the previous contents of this buffer
            p_out.index(buffer).store(numbers.to(p.dtype))
            fence_async_shared()
            barrier()  # every thread has passed its fence before one thread starts the store
            store(p, [tile_n * BLOCK_N, v], p_out.index(buffer))
        gl.store(sums_ptr + tile_v.to(gl.int64) * N + n, sums, n < N)
        position += 2 * steps
        parity ^= 1
    tma.store_wait(0)  # shared memory is freed when the program ends, so wait until all stores have read it


@gluon.jit(do_not_specialize=["N"])
def _cross_entropy_gluon_kernel(
    x,  # descriptor of (N, C)
    w,  # descriptor of (V, C)
    p,  # descriptor of (N, V)
    target_logits_ptr,  # (N,) fp32, in base 2
    sums_ptr,  # (tiles along V, N) fp32: the sums of p in each tile
    N,
    V,
    C,
    PARTIAL: gl.constexpr,  # whether the last tile along V is partial
):
    xs = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005
    ws = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_type.shape, w.layout)  # noqa: RUF005
    p_out = gl.allocate_shared_memory(p.dtype, [2 * BUFFERS] + p.block_type.shape, p.layout)  # noqa: RUF005
    full, empty, turn = start_barriers(STAGES)
    gl.warp_specialize([
        (_consume, (0, xs, ws, p_out, full, empty, turn, p, target_logits_ptr, sums_ptr, N, V, C, PARTIAL)),
        (_consume, (1, xs, ws, p_out, full, empty, turn, p, target_logits_ptr, sums_ptr, N, V, C, PARTIAL)),
        (_produce, (x, w, xs, ws, full, empty, N, V, C)),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit(do_not_specialize=["N", "ignore_index"])
def _cross_entropy_shift_kernel(
    x_ptr,  # (N, C)
    w_ptr,  # (V, C)
    targets_ptr,  # (N,) int64
    target_logits_ptr,  # (N,) fp32
    ignore_index,
    N,
    V,
    C,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the target's logit of each row, in base 2. It is infinity for an ignored row, so the matmul writes p = 0.

    If the target is outside the vocabulary, it is the logit of word 0, and _cross_entropy_finish_kernel writes NaN as
    the loss.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets_ptr + n, n < N, other=ignore_index)
    word = tl.where((target >= 0) & (target < V), target, 0)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)[None, :]
        mask = (n[:, None] < N) & (c < C)
        x = tl.load(x_ptr + n.to(tl.int64)[:, None] * C + c, mask, other=0.0).to(tl.float32)
        products += x * tl.load(w_ptr + word[:, None] * C + c, mask, other=0.0).to(tl.float32)
    logits = tl.where(target == ignore_index, float("inf"), tl.sum(products, 1) * LOG2E)
    tl.store(target_logits_ptr + n, logits, n < N)


@triton.jit
def _logits(x_ptr, w_ptr, n, v, N, V, C, BLOCK: tl.constexpr):
    """Return the logits of rows n and columns v in base 2, and -inf outside the matrix."""
    total = tl.zeros((n.shape[0], v.shape[0]), tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + n.to(tl.int64)[:, None] * C + c[None, :], (n[:, None] < N) & (c[None, :] < C), other=0.0)
        w = tl.load(w_ptr + v.to(tl.int64)[None, :] * C + c[:, None], (v[None, :] < V) & (c[:, None] < C), other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    return tl.where((n[:, None] < N) & (v[None, :] < V), total * LOG2E, -float("inf"))


@triton.jit(do_not_specialize=["N", "ignore_index"])
def _cross_entropy_finish_kernel(
    x_ptr,  # (N, C)
    w_ptr,  # (V, C)
    p_ptr,  # (N, V)
    targets_ptr,  # (N,) int64
    target_logits_ptr,  # (N,) fp32, in base 2
    sums_ptr,  # (tiles, N) fp32
    losses_ptr,  # (N,) fp32
    scales_ptr,  # (N,) fp32: 1 / total, 0 for an ignored row
    scaled_x_ptr,  # (N, C): x times the scale
    ignore_index,
    tiles,
    N,
    V,
    C,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the losses and the scales, scale x, and subtract each row's total from its p[target]."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_bounds = n < N
    target = tl.load(targets_ptr + n, in_bounds, other=ignore_index)
    ignored, in_vocab = target == ignore_index, (target >= 0) & (target < V)
    target_logit = tl.load(target_logits_ptr + n, in_bounds, other=float("inf"))
    sums = tl.zeros((32, ROWS), tl.float32)
    for start in range(0, tiles, 32):
        i = start + tl.arange(0, 32)[:, None]
        sums += tl.load(sums_ptr + i.to(tl.int64) * N + n[None, :], (i < tiles) & in_bounds[None, :], other=0.0)
    total, shift = tl.sum(sums, 0), target_logit + ROOM
    too_large = (total < LARGEST) == 0  # or NaN
    if tl.sum(too_large.to(tl.int32), 0) > 0:  # compute these rows again, with their maximum as shift
        largest = tl.full((ROWS,), -float("inf"), tl.float32)
        for start in range(0, V, BLOCK):
            logits = _logits(x_ptr, w_ptr, n, start + tl.arange(0, BLOCK), N, V, C, BLOCK)
            largest = tl.maximum(largest, tl.max(logits, 1))
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            p = tl.exp2(_logits(x_ptr, w_ptr, n, v, N, V, C, BLOCK) - largest[:, None])
            total += tl.sum(p, 1)
            mask = in_bounds[:, None] & (v[None, :] < V)
            tl.store(p_ptr + n.to(tl.int64)[:, None] * V + v[None, :], p.to(p_ptr.dtype.element_ty), mask)
        shift = largest
        tl.debug_barrier()  # all threads must write p before one overwrites p[target]
    loss = tl.where(in_vocab, (tl.log2(total) + shift - target_logit) / LOG2E, float("nan"))
    tl.store(losses_ptr + n, tl.where(ignored, 0.0, loss), in_bounds)
    scale = tl.where(ignored, 0.0, 1.0 / total)
    tl.store(scales_ptr + n, scale, in_bounds)
    at_target = (tl.exp2(target_logit - shift) - total).to(p_ptr.dtype.element_ty)
    tl.store(p_ptr + n.to(tl.int64) * V + target, at_target, in_bounds & in_vocab & (ignored == 0))
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)[None, :]
        offsets, mask = n.to(tl.int64)[:, None] * C + c, in_bounds[:, None] & (c < C)
        x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32)
        tl.store(scaled_x_ptr + offsets, (x * scale[:, None]).to(scaled_x_ptr.dtype.element_ty), mask)


def supports(x: Tensor, weight: Tensor) -> bool:
    """Return whether this method can be used: in bf16, on Hopper, with rows of a multiple of 16 bytes for TMA.

    In fp16 p would overflow.
    """
    if x.device.type != "cuda" or any(tensor.dtype != torch.bfloat16 for tensor in (x, weight)):
        return False
    if len(weight) % 8 or x.shape[-1] % 8:
        return False
    return torch.cuda.get_device_capability(x.device)[0] == 9


def unnormalised_gradient(
    x: Tensor, weight: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the losses (n,) in fp32, and p (n, V) into `out`. Return scale * x (n, C) and scale (n, 1) in fp32.

    The scale of a row is 1 / total. All tensors are contiguous, and x and weight are from align().
    """
    (N, C), V = x.shape, len(weight)
    tiles_n, tiles_v = triton.cdiv(N, BLOCK_N.value), triton.cdiv(V, BLOCK_V.value)
    make_context_current()
    logits_of_targets = target_logits(x, weight, targets, ignore_index)
    sums = torch.empty(tiles_v, N, dtype=torch.float32, device=x.device)
    _cross_entropy_gluon_kernel[(min(tiles_n * tiles_v, multiprocessors(x.device)),)](
        tma_descriptor(x, BLOCK_N.value, BLOCK_C.value),
        tma_descriptor(weight, BLOCK_V.value, BLOCK_C.value),
        tma_descriptor(out, BLOCK_N.value, SLICE.value),
        logits_of_targets,
        sums,
        N,
        V,
        C,
        PARTIAL=V % BLOCK_V.value != 0,
        num_warps=4,
        maxnreg=168,  # for all 12 warps at the start; then the producer's warpgroup gives most of it to the consumers
    )
    return finish(x, weight, out, targets, logits_of_targets, sums, losses, ignore_index)


def target_logits(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return what _cross_entropy_shift_kernel computes."""
    (N, C), logits = x.shape, torch.empty(len(x), dtype=torch.float32, device=x.device)
    arguments = x, weight, targets, logits, ignore_index, N, len(weight), C
    _cross_entropy_shift_kernel[(triton.cdiv(N, 4),)](*arguments, ROWS=4, BLOCK=1024)
    return logits


def finish(
    x: Tensor,
    weight: Tensor,
    p: Tensor,
    targets: Tensor,
    target_logits: Tensor,
    sums: Tensor,
    losses: Tensor,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """Run _cross_entropy_finish_kernel, and return its scaled x and its scales (n, 1)."""
    (N, C), scaled_x = x.shape, torch.empty_like(x)
    scales = torch.empty(N, 1, dtype=torch.float32, device=x.device)
    tensors = x, weight, p, targets, target_logits, sums, losses, scales, scaled_x
    sizes = ignore_index, len(sums), N, len(weight), C
    _cross_entropy_finish_kernel[(triton.cdiv(N, 16),)](*tensors, *sizes, ROWS=16, BLOCK=64)
    return scaled_x, scales
