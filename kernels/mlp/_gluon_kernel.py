"""The kernel of gluon.py. It computes what the kernel of triton.py does, and runs the epilogue during a matmul.

    forward   h = x W_fc^T + b_fc     stores h and a = gelu(h)
    backward  da = dy W_proj          loads h; stores dh = da gelu'(h), a again, and for each warp the column sums
                                      of its rows of dh

One program a multiprocessor walks over the tiles of (N, F). Its warps have three roles, which run at the same time:

    producer       one warp; it loads the operands of all tiles by TMA, one k-step after another, into a ring of slots
    two consumers  four warps each; they take the tiles in turns, and one multiplies while the other runs its epilogue

This schedule is called ping-pong. The tensor cores wait for an epilogue only if the epilogue takes longer than the
matmul of a tile.

Synchronisation. kernels/hopper/ring.py has the ring and the ping-pong. The ring's fills are the k-steps of all tiles,
so each consumer skips the fills of the other consumer's tiles. A consumer's turn begins when the other one has issued
the last wgmma of the tile before. So all earlier fills have arrived by then, as the ring demands.

Epilogue. A consumer processes its tile in slices of columns, and stores each slice through shared memory by TMA. TMA
writes nothing outside the matrix, and its loads read zeros there. In the backward, h also comes through the ring: the
slot of h follows the slots of its tile's operands, and the consumer reads h into registers at once. The forward rounds
h before it computes gelu(h), so forward and backward compute the same bits of a.

An epilogue costs time although it runs during a matmul: at the GPU's power limit each instruction and each byte counts.
Microseconds on one H200 at its limit, beside the same matmul by cuBLAS, in turns of 0.15 s:

                   forward    cuBLAS    backward    cuBLAS
    65,536 x 768       563       510         712       531
    32,768 x 1024      471       455         562       465
    32,768 x 1600    1,098     1,036       1,200     1,040

At 65,536 x 768 cuBLAS's matmul takes 0.37 J, the forward 0.40 and the backward 0.50. The backward also reads h and
writes a, 0.4 GB each, and a copy of h takes 0.12 J. Without a's store the backward takes 70 us less, without the
exponentials of gelu 65, and without the column sums 40.

The forward rounds h in pairs, and each warp sums its own rows of dh, to save instructions: at 65,536 x 768 this saved
4% and 1%. At 32,768 x 1600 it costs 3% and 5%; the reason is unknown.

In fp8 (see _fp8.py) x, w, a and dh are in 8 bits. A k-step has 128 channels, so a slot has the same bytes. The tensor
cores need the sum's dimension contiguous in both operands, so in the backward w is W_proj by columns, (F, C). The
matmuls of the backward that follow need dh by rows and by columns, and a by columns. A consumer has these numbers in
registers, and stores a slice through shared memory a second time, transposed.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from kernels.fp8 import X_SCALE
from kernels.gpu import align, make_context_current, multiprocessors
from kernels.hopper.registers import split_columns, to_fp32
from kernels.hopper.ring import multiply_in_turn, start_ping_pong, start_ring
from kernels.hopper.tma import allocate_tiles, fence_and_sync, load, reinterpret, store, tma_descriptor
from kernels.matmul import round_to
from kernels.mlp._activations import gelu_derivative, gelu_over_h
from kernels.quantize import scaled, to_fp8
from kernels.tiles import place

WARPS = gl.constexpr(4)  # of a consumer
A_SCALE = gl.constexpr(X_SCALE)  # of a in fp8
# The kernel takes up to 224 of the 227 KB of shared memory: slots of 32 KB, which a tile of h must fill, and slices of
# the outputs
BLOCK_N = gl.constexpr(128)  # rows of a tile
BLOCK_F = gl.constexpr(128)  # columns of a tile
ROW_BYTES = gl.constexpr(128)  # of a k-step: 64 channels in 16 bits, 128 in fp8
SLICE = gl.constexpr(32)  # columns that are stored at once
BUFFERS = gl.constexpr(2)  # slices of each output of a consumer that may wait to be stored
STAGES = gl.constexpr(5)  # slots of the ring
GROUP = gl.constexpr(8)  # tiles of rows that share the weight's tiles in the L2; 4, 16 and 32 are within 2%


@gluon.jit
def _halves_of_h(xs, ws, slot, h):
    """Return the shared memory of a slot as the left and the right half of a tile of h."""
    left = reinterpret(xs.index(slot.index), h.dtype, h.block_type.shape, h.layout)
    right = reinterpret(ws.index(slot.index), h.dtype, h.block_type.shape, h.layout)
    return left, right


@gluon.jit
def _produce(x, w, h, xs, ws, ring, N, F, C, BACKWARD: gl.constexpr):
    """Run the producer: load the operands of all tiles of this program into the ring."""
    BITS: gl.constexpr = x.dtype.primitive_bitwidth
    BLOCK_C: gl.constexpr = xs.shape[2]
    BYTES: gl.constexpr = (BLOCK_N + BLOCK_F) * ROW_BYTES
    steps = gl.cdiv(C, BLOCK_C)
    slot = ring.slot(0)
    for tile in range(gl.program_id(0), gl.cdiv(N, BLOCK_N) * gl.cdiv(F, BLOCK_F), gl.num_programs(0)):
        tile_n, tile_f = place(tile, gl.cdiv(N, BLOCK_N), gl.cdiv(F, BLOCK_F), GROUP)
        n, f = tile_n * BLOCK_N, tile_f * BLOCK_F
        for step in range(steps + BACKWARD):  # in the backward, one more step loads h
            full = ring.acquire(slot, BYTES)
            if step < steps:
                load(x, [n, step * BLOCK_C], full, xs.index(slot.index))
                if BACKWARD and BITS == 16:
                    load(w, [step * BLOCK_C, f], full, ws.index(slot.index))
                else:
                    load(w, [f, step * BLOCK_C], full, ws.index(slot.index))
            elif BACKWARD:
                left, right = _halves_of_h(xs, ws, slot, h)
                load(h, [n, f], full, left)
                load(h, [n, f + BLOCK_F // 2], full, right)
            slot = ring.next(slot)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr,  # 0 takes the first, third ... tile of the program, 1 takes the others
    xs, ws, ring, ping_pong, result_out, columns_out, a_out, h, a, dh, dh_columns, b_ptr, w_unit_ptr, partial_ptr,
    x_unit, N, F, C, BACKWARD: gl.constexpr,
):  # fmt: skip
    """Run one consumer: multiply, then run the epilogue, for every second tile of this program."""
    SLICES: gl.constexpr = BLOCK_F // SLICE
    FP8: gl.constexpr = xs.dtype.primitive_bitwidth == 8
    OUTPUTS: gl.constexpr = 3 if BACKWARD and FP8 else 2
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_F, 32 if FP8 else 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_F // 2, 16])
    slice_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLICE, 16])
    column_layout: gl.constexpr = gl.SliceLayout(0, slice_layout)
    steps = gl.cdiv(C, xs.shape[2])
    programs = gl.num_programs(0)
    fill = CONSUMER * (steps + BACKWARD)  # the first one of this tile; in the backward, h takes one more
    if FP8:
        unit = gl.load(w_unit_ptr)
        if not BACKWARD:
            unit *= x_unit  # in the backward, dh is stored with the scale of dy
    parity = 0  # of this consumer's turns
    first = gl.program_id(0) + CONSUMER * programs
    for tile in range(first, gl.cdiv(N, BLOCK_N) * gl.cdiv(F, BLOCK_F), 2 * programs):
        tile_n, tile_f = place(tile, gl.cdiv(N, BLOCK_N), gl.cdiv(F, BLOCK_F), GROUP)
        n, f = tile_n * BLOCK_N, tile_f * BLOCK_F
        total = gl.zeros((BLOCK_N, BLOCK_F), gl.float32, tile_layout)
        total, last, after = multiply_in_turn(
            total, xs, ws, ring, ping_pong, CONSUMER, parity, fill, steps, W_BY_ROWS=FP8 or not BACKWARD
        )
        if BACKWARD:
            ring.wait_full(after)  # before the turn ends, because a turn promises that all earlier fills have arrived
        ping_pong.pass_on(CONSUMER)
        if BACKWARD:  # read h while the last wgmma is in flight
            left, right = _halves_of_h(xs, ws, after, h)
            h_parts = split_columns(left.load(half_layout), SLICES // 2, slice_layout)
            h_parts += split_columns(right.load(half_layout), SLICES // 2, slice_layout)
            fence_async_shared()
            ring.arrive_empty(after)
        total = warpgroup_mma_wait(0, deps=(total,))
        ring.arrive_empty(last)

        parts = split_columns(total, SLICES, slice_layout)
        for i in gl.static_range(SLICES):
            product = parts[i] * unit if FP8 else parts[i]
            if BACKWARD:
                h_rounded = to_fp32(h_parts[i])
                s = gelu_over_h(h_rounded, True)
                gelu = h_rounded * s
                value = product * gelu_derivative(h_rounded, s)
            else:
                value = product
                if b_ptr is not None:
                    columns = f + i * SLICE + gl.arange(0, SLICE, column_layout)
                    value += gl.load(b_ptr + columns, columns < F, other=0.0).to(gl.float32)[None, :]
            if BACKWARD and FP8:
                result = to_fp8(scaled(value, 1.0), dh.dtype)
            elif BACKWARD:
                result = value.to(h.dtype)
            else:
                result = round_to(value, h.dtype)
                h_rounded = to_fp32(result)
                gelu = h_rounded * gelu_over_h(h_rounded, True)
            if FP8 and BACKWARD:  # infinity is NaN in the forward, which is enough: the loss is NaN, the step refused
                a_slice = to_fp8(gelu * A_SCALE, a.dtype)
            elif FP8:
                a_slice = to_fp8(scaled(gelu, A_SCALE), a.dtype)
            else:
                a_slice = gelu.to(a.dtype)
            buffer = CONSUMER * BUFFERS + i % BUFFERS
            tma.store_wait(OUTPUTS * (BUFFERS - 1))  # until TMA has read the previous contents of these buffers
            result_out.index(buffer).store(result)
            if OUTPUTS == 3:
                columns_out.index(buffer).permute((1, 0)).store(result)
                a_out.index(buffer).permute((1, 0)).store(a_slice)
            else:
                a_out.index(buffer).store(a_slice)
            fence_and_sync()
            store(dh if BACKWARD else h, [n, f + i * SLICE], result_out.index(buffer))
            if OUTPUTS == 3:
                store(dh_columns, [f + i * SLICE, n], columns_out.index(buffer))
                store(a, [f + i * SLICE, n], a_out.index(buffer))
            else:
                store(a, [n, f + i * SLICE], a_out.index(buffer))
            if partial_ptr is not None:
                # a warp sums its own rows, 16 of every 64, and waits for no other warp
                sums = gl.sum(gl.sum(value.reshape(BLOCK_N // 64, WARPS, 16, SLICE), 0), 1)
                if FP8:
                    sums *= x_unit
                row = tile_n * WARPS + gl.arange(0, WARPS, gl.SliceLayout(1, sums.type.layout))
                column = f + i * SLICE + gl.arange(0, SLICE, gl.SliceLayout(0, sums.type.layout))
                offsets = row.to(gl.int64)[:, None] * F + column[None, :]
                gl.store(partial_ptr + offsets, sums, (column < F)[None, :])
        fill += 2 * (steps + BACKWARD)
        parity ^= 1
    tma.store_wait(0)  # shared memory is freed when the program ends, so wait until all stores have read it


@gluon.jit(do_not_specialize=["N"])
def _mlp_gluon_kernel(
    x, w, h, a, dh, dh_columns, b_ptr, w_unit_ptr, partial_ptr, x_unit, N, F, C, BACKWARD: gl.constexpr
):
    """Run the three roles.

    x, w, h, a, dh and dh_columns are TMA descriptors. In the forward x is the input (N, C) and w is w_fc (F, C). In the
    backward x is dy (N, C) and w is w_proj (C, F). h, a and dh are (N, F). b_ptr points to b_fc (F,), and partial_ptr
    to the column sums of dh, see empty_partial_sums().

    In fp8 x_unit is 1 / the scale of x, and of dh in the backward, and w_unit_ptr points to 1 / the scale of w. In the
    backward w is w_proj by columns (F, C), and dh_columns and a are (F, N rounded up to a multiple of 16).
    """
    result = dh if BACKWARD else h
    xs = allocate_tiles(x, STAGES)
    ws = allocate_tiles(w, STAGES)
    result_out = allocate_tiles(result, 2 * BUFFERS)
    a_out = allocate_tiles(a, 2 * BUFFERS)
    columns_out = a_out  # not used, unless dh is stored twice
    if dh_columns is not None:
        columns_out = allocate_tiles(dh_columns, 2 * BUFFERS)
    ring, ping_pong = start_ring(STAGES), start_ping_pong()
    fence_and_sync()
    # each tuple of arguments is written out, because a sum of two tuples cannot contain None
    gl.warp_specialize(
        [
            (_consume, (
                0, xs, ws, ring, ping_pong, result_out, columns_out, a_out, h, a, dh, dh_columns,
                b_ptr, w_unit_ptr, partial_ptr, x_unit, N, F, C, BACKWARD,
            )),
            (_consume, (
                1, xs, ws, ring, ping_pong, result_out, columns_out, a_out, h, a, dh, dh_columns,
                b_ptr, w_unit_ptr, partial_ptr, x_unit, N, F, C, BACKWARD,
            )),
            (_produce, (x, w, h, xs, ws, ring, N, F, C, BACKWARD)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def empty_partial_sums(N: int, F: int, device: torch.device) -> Tensor:
    """Return a tensor for the column sums of dh: (tiles along N x warps of a consumer, F) in fp32."""
    return torch.empty(triton.cdiv(N, BLOCK_N.value) * WARPS.value, F, dtype=torch.float32, device=device)


def launch_kernel(
    x: Tensor,
    w: Tensor,
    h: Tensor,
    a: Tensor,
    *,
    bias: Tensor | None = None,
    dh: Tensor | None = None,
    dh_columns: Tensor | None = None,
    partial: Tensor | None = None,
    x_scale: float = 1.0,
    w_unit: Tensor | None = None,
) -> None:
    """Run the kernel, backward if dh is given and otherwise forward. See _mlp_gluon_kernel for the arguments.

    In fp8, x_scale is the scale of x, and w_unit is 1 / the scale of w. In the backward x is dy, and dh gets its scale.
    """
    N, C = x.shape
    F, backward, fp8 = h.shape[1], dh is not None, w_unit is not None
    n, f, c, columns = BLOCK_N.value, BLOCK_F.value, ROW_BYTES.value // x.element_size(), SLICE.value
    x, w = align(x), align(w)
    tiles = triton.cdiv(N, n) * triton.cdiv(F, f)
    make_context_current()
    _mlp_gluon_kernel[(min(tiles, multiprocessors(x.device)),)](
        x=tma_descriptor(x, n, c),
        w=tma_descriptor(w, *((c, f) if backward and not fp8 else (f, c))),
        h=tma_descriptor(h, n, f // 2 if backward else columns),
        a=tma_descriptor(a, *((columns, n) if backward and fp8 else (n, columns))),
        dh=tma_descriptor(dh, n, columns),
        dh_columns=tma_descriptor(dh_columns, columns, n),
        b_ptr=bias,
        w_unit_ptr=w_unit,
        partial_ptr=partial,
        x_unit=1 / x_scale,
        N=N,
        F=F,
        C=C,
        BACKWARD=backward,
        num_warps=4,
        maxnreg=168,  # for all 12 warps at the start; then the producer's warpgroup gives most of it to the consumers
    )
