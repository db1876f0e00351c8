"""The two kernels of gluon.py. They compute what the kernels of triton.py do, and run the epilogue during a matmul.

    forward   gate, up = x W_fc^T + b_fc    stores both, and a = silu(gate) up
    backward  da = dy W_proj                loads gate and up; stores dgate = da up silu'(gate), dup = da silu(gate), a
                                            again, and for each warp the column sums of its rows of dgate and dup

kernels/mlp/_gluon_kernel.py explains the schedule: a producer loads the operands of all tiles into a ring of slots, and
two consumers take the tiles in turns, so one multiplies while the other runs its epilogue. Two things differ here.

Gate and up. A tile of the forward has 64 hidden units: one TMA load of a box (2, 64, 64) of W_fc (2, F, C) writes 64
rows of the gate and below them the same rows of up. In shared memory the box is a tile of 128 rows, so one wgmma
computes both. A thread holds two of each 8 columns, the same two in both halves, so it has gate and up of a unit.

Slices of the backward. The MLP's consumer reads its tile of h into registers at once. Gate and up together would take
128 registers beside the 128 of da. So a consumer has a second ring, of slices of 32 columns, which a warp of its own
fills by TMA: two slices before the epilogue begins, and each other slice when a slot is free. The consumer writes dgate
and dup over the gate and up that it has read, and TMA stores them from there. A slot is free when TMA has read it.

Estimates for an H200 (132 multiprocessors, 4096 FLOP a cycle each, 1.7 GHz, 4.1 TB/s), for a tile of 128 rows:

                             forward               backward
    columns of the product   128 (64 units)        128
    shared memory            4 x 32 KB: ring       4 x 32 KB: ring
                             12 x 8 KB: outputs    8 x 8 KB: slices, 2 x 8 KB: a
                             224 KB                208 KB
    registers of a thread    128: product          128: product
                             48: rounded outputs   64: gate and up, 48: rounded outputs
    cycles of a matmul       8 C                   8 C
    bytes of the epilogue    48 KB, 2700 cycles    160 KB, 9000 cycles
    tiles, 65,536 x 2048     16,384: 124.1 waves   8,192: 62.1 waves

A tile is 128 x 128, so the tensor cores do 64 FLOP for each byte from the L2, as in the MLP. At C = 768 a matmul takes
6100 cycles: memory limits the backward, and the tensor cores the forward. At C = 2048 the tensor cores limit both. A
step of 64 channels takes 512 cycles, so three steps in flight hide 1500 cycles of a load.

Microseconds on one H200, beside the kernel in Triton and the same matmul by cuBLAS, in turns:

                           forward    Triton    cuBLAS    backward    Triton    cuBLAS
    65,536 x 576, F 1536       431       464       366         396       521       201
    65,536 x 768, F 2048       709       755       662         555       765       339
    16,384 x 2048, F 8192    1,734     1,774     1,686       1,134     1,287       901
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from kernels.gpu import align, make_context_current, multiprocessors
from kernels.hopper.registers import split_columns, to_fp32
from kernels.hopper.ring import Ring, multiply_in_turn, start_ping_pong, start_ring
from kernels.hopper.tma import (
    allocate_tiles,
    fence_and_sync,
    load,
    reinterpret,
    store,
    thread_barrier,
    tma_descriptor,
)
from kernels.matmul import round_to
from kernels.mlp._activations import sigmoid, silu_derivative
from kernels.tiles import place

WARPS = gl.constexpr(4)  # of a consumer
BLOCK_N = gl.constexpr(128)  # rows of a tile
BLOCK_F = gl.constexpr(128)  # columns of a tile; in the forward half of them are the gate's
UNITS = gl.constexpr(64)  # hidden units of a tile of the forward
BLOCK_C = gl.constexpr(64)  # channels of a k-step
SLICE = gl.constexpr(32)  # columns that are stored at once
BUFFERS = gl.constexpr(2)  # slices of a consumer: outputs that wait to be stored, or gate and up that wait to be read
STAGES = gl.constexpr(4)  # slots of the ring
GROUP = gl.constexpr(8)  # tiles of rows that share the weight's tiles in the L2
TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
PART = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))  # a slice of a TILE


class _Slices(NamedTuple):
    """Slices of gate and up for one consumer, which become slices of dgate and dup."""

    gate: gl.shared_memory_descriptor
    up: gl.shared_memory_descriptor
    ring: Ring


@gluon.jit
def _produce(x, w, xs, ws, ring, N, F, C, COLUMNS: gl.constexpr, BACKWARD: gl.constexpr):
    """Load the operands of all tiles of this program into the ring. A tile has COLUMNS of the F columns."""
    tiles_n, tiles_f = gl.cdiv(N, BLOCK_N), gl.cdiv(F, COLUMNS)
    slot = ring.slot(0)
    for tile in range(gl.program_id(0), tiles_n * tiles_f, gl.num_programs(0)):
        tile_n, tile_f = place(tile, tiles_n, tiles_f, GROUP)
        n, f = tile_n * BLOCK_N, tile_f * COLUMNS
        for step in range(gl.cdiv(C, BLOCK_C)):
            full = ring.acquire(slot, (BLOCK_N + BLOCK_F) * BLOCK_C * 2)
            load(x, [n, step * BLOCK_C], full, xs.index(slot.index))
            w_tile = ws.index(slot.index)
            if BACKWARD:
                load(w, [step * BLOCK_C, f], full, w_tile)
            else:
                box = reinterpret(w_tile, w.dtype, w.block_type.shape, w.layout)
                load(w, [0, f, step * BLOCK_C], full, box)
            slot = ring.next(slot)


@gluon.jit
def _multiply(xs, ws, ring, ping_pong, CONSUMER: gl.constexpr, parity, fill, steps, W_BY_ROWS: gl.constexpr):
    """Return the product of a tile, (BLOCK_N, BLOCK_F). multiply_in_turn() explains the arguments."""
    total = gl.zeros((BLOCK_N, BLOCK_F), gl.float32, TILE)
    total, last, _ = multiply_in_turn(total, xs, ws, ring, ping_pong, CONSUMER, parity, fill, steps, W_BY_ROWS)
    ping_pong.pass_on(CONSUMER)
    total = warpgroup_mma_wait(0, deps=(total,))
    ring.arrive_empty(last)
    return total


@gluon.jit
def _consume_forward(
    CONSUMER: gl.constexpr,  # 0 takes the first, third ... tile of the program, 1 takes the others
    xs, ws, ring, ping_pong, gate_out, up_out, a_out, gate, up, a, b_ptr, N, F, C,
):  # fmt: skip
    """Run one consumer: multiply, then run the epilogue, for every second tile of this program."""
    SLICES: gl.constexpr = BLOCK_F // SLICE  # those of the gate, then those of up
    tiles_n, tiles_f, steps = gl.cdiv(N, BLOCK_N), gl.cdiv(F, UNITS), gl.cdiv(C, BLOCK_C)
    programs = gl.num_programs(0)
    fill = CONSUMER * steps  # the first one of this tile
    parity = 0  # of this consumer's turns
    for tile in range(gl.program_id(0) + CONSUMER * programs, tiles_n * tiles_f, 2 * programs):
        tile_n, tile_f = place(tile, tiles_n, tiles_f, GROUP)
        total = _multiply(xs, ws, ring, ping_pong, CONSUMER, parity, fill, steps, True)
        parts = split_columns(total, SLICES, PART)
        for i in gl.static_range(SLICES // 2):
            gate_part, up_part = parts[i], parts[i + SLICES // 2]
            n, f = tile_n * BLOCK_N, tile_f * UNITS + i * SLICE
            if b_ptr is not None:
                columns = f + gl.arange(0, SLICE, gl.SliceLayout(0, PART))
                gate_part += gl.load(b_ptr + columns, columns < F, other=0.0).to(gl.float32)[None, :]
                up_part += gl.load(b_ptr + F + columns, columns < F, other=0.0).to(gl.float32)[None, :]
            gate_rounded, up_rounded = round_to(gate_part, gate.dtype), round_to(up_part, gate.dtype)
            g = to_fp32(gate_rounded)
            product = g * sigmoid(g, True) * to_fp32(up_rounded)
            buffer = CONSUMER * BUFFERS + i % BUFFERS
            tma.store_wait(3 * (BUFFERS - 1))  # until TMA has read the previous contents of these buffers
            gate_out.index(buffer).store(gate_rounded)
            up_out.index(buffer).store(up_rounded)
            a_out.index(buffer).store(product.to(a.dtype))
            fence_and_sync()
            store(gate, [n, f], gate_out.index(buffer))
            store(up, [n, f], up_out.index(buffer))
            store(a, [n, f], a_out.index(buffer))
        fill += 2 * steps
        parity ^= 1
    tma.store_wait(0)  # shared memory is freed when the program ends, so wait until all stores have read it


@gluon.jit
def _load_slices(CONSUMER: gl.constexpr, gate, up, slices, N, F):
    """Load gate and up of a consumer's tiles, one slice after another."""
    tiles_n, tiles_f = gl.cdiv(N, BLOCK_N), gl.cdiv(F, BLOCK_F)
    programs = gl.num_programs(0)
    slot = slices.ring.slot(0)
    for tile in range(gl.program_id(0) + CONSUMER * programs, tiles_n * tiles_f, 2 * programs):
        tile_n, tile_f = place(tile, tiles_n, tiles_f, GROUP)
        for i in range(BLOCK_F // SLICE):
            n, f = tile_n * BLOCK_N, tile_f * BLOCK_F + i * SLICE
            full = slices.ring.acquire(slot, 2 * BLOCK_N * SLICE * 2)
            load(gate, [n, f], full, slices.gate.index(slot.index))
            load(up, [n, f], full, slices.up.index(slot.index))
            slot = slices.ring.next(slot)


@gluon.jit
def _store_sums(value, sums_ptr, tile_n, f, F):
    """Store the column sums of a slice: a warp sums its own rows, 16 of every 64, and waits for no other warp."""
    sums = gl.sum(gl.sum(value.reshape(BLOCK_N // 64, WARPS, 16, SLICE), 0), 1)
    row = tile_n * WARPS + gl.arange(0, WARPS, gl.SliceLayout(1, sums.type.layout))
    column = f + gl.arange(0, SLICE, gl.SliceLayout(0, sums.type.layout))
    gl.store(sums_ptr + row.to(gl.int64)[:, None] * (2 * F) + column[None, :], sums, (column < F)[None, :])


@gluon.jit
def _release(slices, slot):
    """Wait until TMA has read the consumer's slices, and give their slot back."""
    tma.store_wait(0)
    thread_barrier()  # one thread has waited
    slices.ring.arrive_empty(slot)


@gluon.jit
def _consume_backward(
    CONSUMER: gl.constexpr, xs, ws, ring, ping_pong, slices, a_out, dgate, dup, a, partial_ptr, N, F, C
):
    """Run one consumer, as _consume_forward() does.

    A tile has an even number of rounds of `slices`: slice i has the slot and the parity of fill i in every tile.
    """
    SLICES: gl.constexpr = BLOCK_F // SLICE
    gl.static_assert(SLICES % (2 * BUFFERS) == 0)
    tiles_n, tiles_f, steps = gl.cdiv(N, BLOCK_N), gl.cdiv(F, BLOCK_F), gl.cdiv(C, BLOCK_C)
    programs = gl.num_programs(0)
    fill = CONSUMER * steps
    parity = 0
    for tile in range(gl.program_id(0) + CONSUMER * programs, tiles_n * tiles_f, 2 * programs):
        tile_n, tile_f = place(tile, tiles_n, tiles_f, GROUP)
        total = _multiply(xs, ws, ring, ping_pong, CONSUMER, parity, fill, steps, False)
        parts = split_columns(total, SLICES, PART)
        for i in gl.static_range(SLICES):
            n, f = tile_n * BLOCK_N, tile_f * BLOCK_F + i * SLICE
            slot = slices.ring.slot(i)
            slices.ring.wait_full(slot)
            gate_slice, up_slice = slices.gate.index(slot.index), slices.up.index(slot.index)
            g, u = to_fp32(gate_slice.load(PART)), to_fp32(up_slice.load(PART))
            if i > 0:
                _release(slices, slices.ring.slot(i - 1))
            s = sigmoid(g, True)
            silu = g * s
            dg, du = parts[i] * u * silu_derivative(g, s), parts[i] * silu
            if partial_ptr is not None:
                _store_sums(dg, partial_ptr, tile_n, f, F)
                _store_sums(du, partial_ptr + F, tile_n, f, F)
            gate_slice.store(dg.to(dgate.dtype))
            up_slice.store(du.to(dgate.dtype))
            a_out.index(CONSUMER).store((silu * u).to(a.dtype))
            fence_and_sync()
            store(dgate, [n, f], gate_slice)
            store(dup, [n, f], up_slice)
            store(a, [n, f], a_out.index(CONSUMER))
        _release(slices, slices.ring.slot(SLICES - 1))  # also before the program ends, which frees shared memory
        fill += 2 * steps
        parity ^= 1


@gluon.jit(do_not_specialize=["N"])
def _glu_fwd_gluon_kernel(x, w, gate, up, a, b_ptr, N, F, C):
    """Run the three roles.

    TMA descriptors: x (N, C), w (2, F, C), gate and up (N, F) with rows that are 2 F apart, a (N, F). b_ptr points to
    b_fc (2 F,), or is None.
    """
    xs = allocate_tiles(x, STAGES)
    ws = allocate_tiles(x, STAGES)  # a tile of w has the rows and the layout of a tile of x: see _produce()
    gate_out = allocate_tiles(gate, 2 * BUFFERS)
    up_out = allocate_tiles(up, 2 * BUFFERS)
    a_out = allocate_tiles(a, 2 * BUFFERS)
    ring, ping_pong = start_ring(STAGES), start_ping_pong()
    fence_and_sync()
    gl.warp_specialize([
        (_consume_forward, (0, xs, ws, ring, ping_pong, gate_out, up_out, a_out, gate, up, a, b_ptr, N, F, C)),
        (_consume_forward, (1, xs, ws, ring, ping_pong, gate_out, up_out, a_out, gate, up, a, b_ptr, N, F, C)),
        (_produce, (x, w, xs, ws, ring, N, F, C, UNITS, False)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit(do_not_specialize=["N"])
def _glu_bwd_gluon_kernel(dy, w, gate, up, a, dgate, dup, partial_ptr, N, F, C):
    """Run the roles; each consumer has a warp that loads its slices.

    TMA descriptors: dy (N, C), w (C, F), a (N, F), and gate, up, dgate and dup (N, F) with rows that are 2 F apart.
    partial_ptr points to the column sums, see empty_partial_sums(), or is None.
    """
    xs = allocate_tiles(dy, STAGES)
    ws = allocate_tiles(w, STAGES)
    a_out = allocate_tiles(a, 2)
    slices = _Slices(allocate_tiles(gate, BUFFERS), allocate_tiles(up, BUFFERS), start_ring(BUFFERS))
    others = _Slices(allocate_tiles(gate, BUFFERS), allocate_tiles(up, BUFFERS), start_ring(BUFFERS))
    ring, ping_pong = start_ring(STAGES), start_ping_pong()
    fence_and_sync()
    gl.warp_specialize([
        (_consume_backward, (0, xs, ws, ring, ping_pong, slices, a_out, dgate, dup, a, partial_ptr, N, F, C)),
        (_consume_backward, (1, xs, ws, ring, ping_pong, others, a_out, dgate, dup, a, partial_ptr, N, F, C)),
        (_produce, (dy, w, xs, ws, ring, N, F, C, BLOCK_F, True)),
        (_load_slices, (0, gate, up, slices, N, F)),
        (_load_slices, (1, gate, up, others, N, F)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip


def empty_partial_sums(N: int, F: int, device: torch.device) -> Tensor:
    """Return a tensor for the column sums of dgate and dup: (tiles along N x warps of a consumer, 2 F) in fp32."""
    return torch.empty(triton.cdiv(N, BLOCK_N.value) * WARPS.value, 2 * F, dtype=torch.float32, device=device)


# 168 registers are for all 12 warps at the start; then the producer's warpgroup gives most of its own to the consumers
LAUNCH = {"num_warps": 4, "maxnreg": 168}


def launch_forward(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, h: Tensor, a: Tensor) -> None:
    """Write h = x W_fc^T + b_fc, (N, 2 F), and a = silu(gate) up, (N, F)."""
    (N, C), F = x.shape, a.shape[1]
    gate, up = h.chunk(2, 1)
    n, c, columns = BLOCK_N.value, BLOCK_C.value, SLICE.value
    tiles = triton.cdiv(N, n) * triton.cdiv(F, UNITS.value)
    make_context_current()
    _glu_fwd_gluon_kernel[(min(tiles, multiprocessors(x.device)),)](
        x=tma_descriptor(align(x), n, c),
        w=tma_descriptor(align(w_fc).view(2, F, C), 2, UNITS.value, c),
        gate=tma_descriptor(gate, n, columns),
        up=tma_descriptor(up, n, columns),
        a=tma_descriptor(a, n, columns),
        b_ptr=b_fc,
        N=N,
        F=F,
        C=C,
        **LAUNCH,
    )


def launch_backward(dy: Tensor, w_proj: Tensor, h: Tensor, a: Tensor, dh: Tensor, partial: Tensor | None) -> None:
    """Write dh = (dgate, dup), (N, 2 F), a, and with `partial` the partial sums of dh's rows."""
    (N, C), F = dy.shape, a.shape[1]
    n, f, c, columns = BLOCK_N.value, BLOCK_F.value, BLOCK_C.value, SLICE.value
    (gate, up), (dgate, dup) = h.chunk(2, 1), dh.chunk(2, 1)
    tiles = triton.cdiv(N, n) * triton.cdiv(F, f)
    make_context_current()
    _glu_bwd_gluon_kernel[(min(tiles, multiprocessors(dy.device)),)](
        dy=tma_descriptor(align(dy), n, c),
        w=tma_descriptor(align(w_proj), c, f),
        gate=tma_descriptor(gate, n, columns),
        up=tma_descriptor(up, n, columns),
        a=tma_descriptor(a, n, columns),
        dgate=tma_descriptor(dgate, n, columns),
        dup=tma_descriptor(dup, n, columns),
        partial_ptr=partial,
        N=N,
        F=F,
        C=C,
        **LAUNCH,
    )
