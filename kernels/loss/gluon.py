"""The loss of triton.py for Hopper in bf16, in Gluon: the matmul writes exponentials of the logits, so no logits exist.

_unnormalised.py explains the method: p = exp(x W^T - shift) in the epilogue, and what follows from it. The rest is
triton.py's.

The matmul has two consumers that take its tiles in turns: one multiplies while the other exponentiates and stores.
kernels/mlp/_gluon_kernel.py explains this schedule and its barriers.

A soft cap adds an exponential and a reciprocal to the one exponential of a logit. A multiprocessor computes 16 of these
in a cycle, so the epilogue of a tile then takes at least 3,072 cycles. At C = 768 the matmul of the other consumer's
tile takes at least 6,144.
"""

from functools import partial

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from kernels.direct import custom_op
from kernels.gpu import align, hopper_unavailable, make_context_current, multiprocessors
from kernels.gpu import triton_and_cublas_detail as detail  # noqa: F401
from kernels.hopper.registers import exp2, split_columns
from kernels.hopper.ring import multiply_in_turn, start_ping_pong, start_ring
from kernels.hopper.tma import allocate_tiles, fence_and_sync, load, store, tma_descriptor
from kernels.loss import _in_forward
from kernels.loss._softcap import capped, times_slope_at_capped
from kernels.loss._unnormalised import HEADROOM_BITS, LOG2E
from kernels.loss.triton import apply_to_rows, backward, empty_outputs, linear_cross_entropy_in_chunks
from kernels.registry import Unavailable
from kernels.tiles import place

BLOCK_N = gl.constexpr(128)  # rows of a tile
BLOCK_V = gl.constexpr(128)  # columns of a tile, words of the vocabulary
BLOCK_C = gl.constexpr(64)  # channels of a k-step
SLICE = gl.constexpr(32)  # columns that are stored at once
BUFFERS = gl.constexpr(2)  # slices of a consumer that may wait to be stored
STAGES = gl.constexpr(6)  # k-steps in shared memory; the kernel takes 224 of the 227 KB
GROUP = gl.constexpr(32)  # tiles of rows that share a tile of W in the L2: 716 TFLOP/s, and 654 with 8
RUNS = ("^_cross_entropy_gluon_kernel",)
unavailable = partial(hopper_unavailable, "loss")


@gluon.jit
def _produce(x, w, xs, ws, ring, N, V, C):
    """Load the operands of all tiles of this program, one k-step after another, into a ring of slots."""
    tiles_n, tiles_v = gl.cdiv(N, BLOCK_N), gl.cdiv(V, BLOCK_V)
    slot = ring.slot(0)
    for tile in range(gl.program_id(0), tiles_n * tiles_v, gl.num_programs(0)):
        tile_n, tile_v = place(tile, tiles_n, tiles_v, GROUP)
        for step in range(gl.cdiv(C, BLOCK_C)):
            full = ring.acquire(slot, (BLOCK_N + BLOCK_V) * BLOCK_C * 2)
            load(x, [tile_n * BLOCK_N, step * BLOCK_C], full, xs.index(slot.index))
            load(w, [tile_v * BLOCK_V, step * BLOCK_C], full, ws.index(slot.index))
            slot = ring.next(slot)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr,  # 0 takes the first, third ... tile of the program, 1 takes the others
    xs, ws, p_out, ring, ping_pong, p, target_logits_ptr, sums_ptr, N, V, C,
    PARTIAL: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLICE, 16])
    tiles_n, tiles_v, steps = gl.cdiv(N, BLOCK_N), gl.cdiv(V, BLOCK_V), gl.cdiv(C, BLOCK_C)
    programs = gl.num_programs(0)
    fill = CONSUMER * steps  # the first one of this tile
    parity = 0  # of this consumer's turns
    for tile in range(gl.program_id(0) + CONSUMER * programs, tiles_n * tiles_v, 2 * programs):
        tile_n, tile_v = place(tile, tiles_n, tiles_v, GROUP)
        n = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, PART))
        shifts = gl.load(target_logits_ptr + n, n < N, other=0.0) + HEADROOM_BITS
        logits = gl.zeros((BLOCK_N, BLOCK_V), gl.float32, TILE)
        logits, last, _ = multiply_in_turn(
            logits, xs, ws, ring, ping_pong, CONSUMER, parity, fill, steps, W_BY_ROWS=True
        )
        ping_pong.pass_on(CONSUMER)
        logits = warpgroup_mma_wait(0, deps=(logits,))
        ring.arrive_empty(last)

        parts = split_columns(logits, BLOCK_V // SLICE, PART)
        sums = gl.zeros((BLOCK_N,), gl.float32, gl.SliceLayout(1, PART))
        for i in gl.static_range(BLOCK_V // SLICE):
            in_base_2 = capped(parts[i], SOFTCAP) * LOG2E
            numbers = exp2(in_base_2 - shifts[:, None])
            v = tile_v * BLOCK_V + i * SLICE
            if PARTIAL:
                columns = v + gl.arange(0, SLICE, gl.SliceLayout(0, PART))
                numbers = gl.where(columns[None, :] < V, numbers, 0.0)
            sums += gl.sum(numbers, 1)
            numbers = times_slope_at_capped(numbers, in_base_2, SOFTCAP)  # times_slope() would spill 8 bytes
            buffer = CONSUMER * BUFFERS + i % BUFFERS
            tma.store_wait(BUFFERS - 1)  # until TMA has read the previous contents of this buffer
            p_out.index(buffer).store(numbers.to(p.dtype))
            fence_and_sync()
            store(p, [tile_n * BLOCK_N, v], p_out.index(buffer))
        gl.store(sums_ptr + tile_v.to(gl.int64) * N + n, sums, n < N)
        fill += 2 * steps
        parity ^= 1
    tma.store_wait(0)  # shared memory is freed when the program ends, so wait until all stores have read it


@gluon.jit(do_not_specialize=["N"])
def _cross_entropy_gluon_kernel(
    x,  # descriptor of (N, C)
    w,  # descriptor of (V, C)
    p,  # descriptor of (N, V)
    target_logits_ptr,  # (N,) fp32, capped and in base 2
    sums_ptr,  # (tiles along V, N) fp32: the sums of p's rows in each tile, before the slope of the cap
    N,
    V,
    C,
    PARTIAL: gl.constexpr,  # whether the last tile along V is partial
    SOFTCAP: gl.constexpr,  # None: no cap
):
    xs = allocate_tiles(x, STAGES)
    ws = allocate_tiles(w, STAGES)
    p_out = allocate_tiles(p, 2 * BUFFERS)
    ring, ping_pong = start_ring(STAGES), start_ping_pong()
    fence_and_sync()
    gl.warp_specialize([
        (_consume, (0, xs, ws, p_out, ring, ping_pong, p, target_logits_ptr, sums_ptr, N, V, C, PARTIAL, SOFTCAP)),
        (_consume, (1, xs, ws, p_out, ring, ping_pong, p, target_logits_ptr, sums_ptr, N, V, C, PARTIAL, SOFTCAP)),
        (_produce, (x, w, xs, ws, ring, N, V, C)),
    ], [4, 1], [240, 24])  # fmt: skip


def exponentials(x: Tensor, weight: Tensor, target_logits: Tensor, out: Tensor, softcap: float | None = None) -> Tensor:
    """Do what exponentials() of _exponentials.py does. x and weight are from align()."""
    N, C = x.shape
    V = len(weight)
    tiles_n, tiles_v = triton.cdiv(N, BLOCK_N.value), triton.cdiv(V, BLOCK_V.value)
    make_context_current()
    sums = torch.empty(tiles_v, N, dtype=torch.float32, device=x.device)
    _cross_entropy_gluon_kernel[(min(tiles_n * tiles_v, multiprocessors(x.device)),)](
        x=tma_descriptor(x, BLOCK_N.value, BLOCK_C.value),
        w=tma_descriptor(weight, BLOCK_V.value, BLOCK_C.value),
        p=tma_descriptor(out, BLOCK_N.value, SLICE.value),
        target_logits_ptr=target_logits,
        sums_ptr=sums,
        N=N,
        V=V,
        C=C,
        PARTIAL=V % BLOCK_V.value != 0,
        SOFTCAP=softcap,
        num_warps=4,
        maxnreg=168,  # for all 12 warps at the start; then the producer's warpgroup gives most of it to the consumers
    )
    return sums


def compute_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    gradients: bool,
    whole: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses and its gradients, as linear_cross_entropy() of triton.py does."""
    x, weight = align(x), align(weight)
    options = {"exponentials": exponentials, "softcap": softcap}
    return linear_cross_entropy_in_chunks(x, weight, targets, ignore_index, gradients, whole, **options)


linear_cross_entropy = custom_op(
    "hotswap::linear_cross_entropy_gluon", compute_loss, empty_outputs, backward, _in_forward.setup_context
)


def refusal(x: Tensor, weight: Tensor, *rest: object, fp8: bool = False) -> str | None:
    """Return what the kernel takes instead of these dtypes or widths, or None if it takes them."""
    for dtype in (x.dtype, weight.dtype):  # in fp16 p would overflow
        if dtype != torch.bfloat16:
            return f"bfloat16, not {dtype}"
    V, C = weight.shape
    if V % 8 or C % 8:  # TMA needs rows of a multiple of 16 bytes
        return f"C and V that are multiples of 8, not {C} and {V}"
    return None


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1, softcap: float | None = None) -> Tensor:
    if reason := refusal(x, weight):
        raise Unavailable(f"loss=gluon takes {reason}: choose kernels.loss=triton")
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index, False, softcap)  # in chunks, not whole
