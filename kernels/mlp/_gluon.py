"""The kernel of triton.py for Hopper, in Gluon (Triton's dialect with the hardware in sight): the epilogue is hidden.

    forward   h = x W_fc^T + b_fc     stores h and a = gelu(h)
    backward  da = dy W_proj          loads h; stores dh = da gelu'(h), a again, and the sums of dh's columns by tile

A program a multiprocessor walks over tiles of (N, F), in three parts that run at once ("ping-pong"):

    producer     one warp, which fetches by TMA the operands of all tiles, one k-step after another, into a ring
    consumers    two warpgroups, which take the tiles in turns: while one multiplies, the other is in its epilogue

so the tensor cores wait for an epilogue only if it lasts longer than a tile's product. A barrier a slot says that it is
full (its bytes have landed), another that it is empty (the consumer that reads it is done). Ring positions count the
k-steps of all tiles: a consumer skips those of the other's. `turn` lets one multiply only when the other has issued its
last product. A wait is for the parity of a phase, so none may come a lap early (on a new barrier a wait for parity 1
passes at once). `turn` sees to that too: whose turn it is knows that all earlier slots were full.

An epilogue takes its tile in slices of columns, through shared memory and stores by TMA, which clip what is beyond the
matrix as loads fill it with zeros. The backward's h comes through the ring as well, in a slot after those of its tile's
operands, and is read into registers at once. h is rounded before gelu sees it, so both times a is the same bits.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gpu import bind_context, processors
from kernels.hopper import barrier, described, load, reinterpret, store

K0 = gl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): gelu(h) = h sigmoid(K0 (h + K1 h^3)), the tanh form
K1 = gl.constexpr(0.044715)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _slope(h):
    """gelu(h) / h. Two approximate instructions, each right to some 2^-22: tanh's one, right to 2^-11, would not do."""
    power = h * (h * h * (-K0 * K1 * LOG2E) - K0 * LOG2E)
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
        "=f,f",
        [power],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _place(tile, N, F, BLOCK_N: gl.constexpr, BLOCK_F: gl.constexpr, GROUP: gl.constexpr):
    """Row and column of a tile: GROUP tiles down before one to the right, so that programs share operands in the L2."""
    tiles_n, tiles_f = gl.cdiv(N, BLOCK_N), gl.cdiv(F, BLOCK_F)
    band, within = tile // (GROUP * tiles_f), tile % (GROUP * tiles_f)
    height = gl.minimum(tiles_n - band * GROUP, GROUP)
    return band * GROUP + within % height, within // height * BLOCK_F


@gluon.jit
def _slices(tile, COUNT: gl.constexpr, layout: gl.constexpr):
    """Its columns in COUNT parts, in the layout of an own product: the same registers under other names."""
    parts = (tile,)
    for _ in gl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(parts)):
            part = parts[i]
            halves += part.reshape(part.shape[0], 2, part.shape[1] // 2).permute(0, 2, 1).split()
        parts = halves
    out = ()
    for i in gl.static_range(COUNT):
        out += (gl.convert_layout(parts[i], layout, assert_trivial=True),)
    return out


@gluon.jit
def _produce(
    x, w, h, xs, ws, full, empty, N, F, C,
    BACKWARD: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_C: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = xs.shape[0]
    BYTES: gl.constexpr = (BLOCK_N + BLOCK_F) * BLOCK_C * 2
    steps = gl.cdiv(C, BLOCK_C)
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), gl.cdiv(N, BLOCK_N) * gl.cdiv(F, BLOCK_F), gl.num_programs(0)):
        tile_n, f = _place(tile, N, F, BLOCK_N, BLOCK_F, GROUP)
        n = tile_n * BLOCK_N
        for step in range(steps + BACKWARD):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            if BACKWARD:
                if step < steps:
                    load(x, [n, step * BLOCK_C], full.index(stage), xs.index(stage))
                    load(w, [step * BLOCK_C, f], full.index(stage), ws.index(stage))
                else:
                    rest = reinterpret(ws.index(stage), h.dtype, h.block_type.shape, h.layout)
                    load(h, [n, f], full.index(stage), xs.index(stage))
                    load(h, [n, f + BLOCK_F // 2], full.index(stage), rest)
            else:
                load(x, [n, step * BLOCK_C], full.index(stage), xs.index(stage))
                load(w, [f, step * BLOCK_C], full.index(stage), ws.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _consume(
    WHICH: gl.constexpr,  # 0 takes a program's first, third ... tile, 1 the others
    xs, ws, full, empty, turn, out, h, a, dh, b_ptr, partial_ptr, N, F, C,
    BACKWARD: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_C: gl.constexpr, GROUP: gl.constexpr,
    SLICE: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = xs.shape[0]
    SLICES: gl.constexpr = BLOCK_F // SLICE
    OUTS: gl.constexpr = out.shape[0] // 2
    dtype: gl.constexpr = a.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_F, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_F // 2, 16])
    sliced: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLICE, 16])
    columns: gl.constexpr = gl.SliceLayout(0, sliced)
    steps = gl.cdiv(C, BLOCK_C)
    programs = gl.num_programs(0)
    at, times = WHICH * (steps + BACKWARD), 0  # this tile's place in the ring; how many this had before, modulo 2
    first = gl.program_id(0) + WHICH * programs
    for tile in range(first, gl.cdiv(N, BLOCK_N) * gl.cdiv(F, BLOCK_F), 2 * programs):
        tile_n, f = _place(tile, N, F, BLOCK_N, BLOCK_F, GROUP)
        n = tile_n * BLOCK_N
        stage, phase, last = at % STAGES, at // STAGES & 1, 0
        total = gl.zeros((BLOCK_N, BLOCK_F), gl.float32, product)
        mbarrier.wait(turn.index(WHICH), times ^ (1 - WHICH))
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            columns_w = ws.index(stage) if BACKWARD else ws.index(stage).permute((1, 0))
            total = warpgroup_mma(xs.index(stage), columns_w, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))  # one product is always under way: the last slot's is done
            mbarrier.arrive(empty.index(last), pred=step > 0)
            last = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if BACKWARD:
            mbarrier.wait(full.index(stage), phase)  # h; before `turn`, by which the other relies on it
        mbarrier.arrive(turn.index(1 - WHICH))
        if BACKWARD:  # while the last product is under way
            rest = reinterpret(ws.index(stage), dtype, h.block_type.shape, h.layout)
            h_parts = _slices(xs.index(stage).load(half), SLICES // 2, sliced)
            h_parts += _slices(rest.load(half), SLICES // 2, sliced)
            fence_async_shared()
            mbarrier.arrive(empty.index(stage))
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(last))

        parts = _slices(total, SLICES, sliced)
        for i in gl.static_range(SLICES):
            at_column = f + i * SLICE + gl.arange(0, SLICE, columns)
            if BACKWARD:
                kept = h_parts[i].to(gl.float32)
                s = _slope(kept)
                g = kept * s
                slope = s + (g - g * s) * (kept * kept * (3 * K0 * K1) + K0)
                wanted = (parts[i] * slope).to(dtype)
            else:
                sum_b = parts[i]
                if b_ptr is not None:
                    sum_b += gl.load(b_ptr + at_column, at_column < F, other=0.0).to(gl.float32)[None, :]
                wanted = sum_b.to(dtype)
                kept = wanted.to(gl.float32)
                g = kept * _slope(kept)
            wanted_at = out.index(WHICH * OUTS + 2 * i % OUTS)
            a_at = out.index(WHICH * OUTS + (2 * i + 1) % OUTS)
            tma.store_wait(OUTS - 2)  # until these two have been read
            wanted_at.store(wanted)
            a_at.store(g.to(dtype))
            fence_async_shared()
            barrier()  # every thread's fence, before the one that stores
            store(dh if BACKWARD else h, [n, f + i * SLICE], wanted_at)
            store(a, [n, f + i * SLICE], a_at)
            if partial_ptr is not None:
                sums = gl.sum(wanted.to(gl.float32), 0)
                gl.store(partial_ptr + tile_n.to(gl.int64) * F + at_column, sums, at_column < F)
        at += 2 * (steps + BACKWARD)
        times ^= 1
    tma.store_wait(0)  # shared memory lives no longer than the program


@gluon.jit(do_not_specialize=["N"])
def _mlp_gluon_kernel(
    x, w, h, a, dh, b_ptr, partial_ptr, N, F, C,
    BACKWARD: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_C: gl.constexpr, GROUP: gl.constexpr,
    SLICE: gl.constexpr, OUTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Descriptors of x or dy (N, C), w (F, C) or (C, F), h, a, dh (N, F); pointers to b (F,), partial (tiles, F)."""
    gl.static_assert(not BACKWARD or BLOCK_N * BLOCK_F == (BLOCK_N + BLOCK_F) * BLOCK_C, "h has a slot of the ring")
    xs = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005
    ws = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_type.shape, w.layout)  # noqa: RUF005
    out = gl.allocate_shared_memory(a.dtype, [2 * OUTS] + a.block_type.shape, a.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()  # TMA will count bytes in them
    barrier()
    # the tuples of arguments are written out: added together they may hold no None
    gl.warp_specialize(
        [
            (_consume, (
                0, xs, ws, full, empty, turn, out, h, a, dh, b_ptr, partial_ptr, N, F, C,
                BACKWARD, BLOCK_N, BLOCK_F, BLOCK_C, GROUP, SLICE,
            )),
            (_consume, (
                1, xs, ws, full, empty, turn, out, h, a, dh, b_ptr, partial_ptr, N, F, C,
                BACKWARD, BLOCK_N, BLOCK_F, BLOCK_C, GROUP, SLICE,
            )),
            (_produce, (x, w, h, xs, ws, full, empty, N, F, C, BACKWARD, BLOCK_N, BLOCK_F, BLOCK_C, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


DTYPES = (torch.bfloat16, torch.float16)


def takes(dtype: torch.dtype, C: int, F: int, device: torch.device) -> bool:
    """Whether the kernel runs there: 16 bits, rows at multiples of 16 bytes for TMA, and Hopper's wgmma."""
    if device.type != "cuda" or dtype not in DTYPES or C % 8 or F % 8:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def tiling() -> dict:
    """227 KB of shared memory: STAGES x 32 KB, and for each consumer OUTS slices of 8 KB that wait to be stored."""
    return {"BLOCK_N": 128, "BLOCK_F": 128, "BLOCK_C": 64, "GROUP": 8, "SLICE": 32, "OUTS": 4, "STAGES": 5}


def candidates(backward: bool) -> list[dict]:
    """What scripts/tune.py tries."""
    slices = {"SLICE": 64, "OUTS": 2}, {"OUTS": 2, "STAGES": 6}, {"OUTS": 2}, {"SLICE": 64, "OUTS": 2, "GROUP": 4}
    tall = [] if backward else [{"BLOCK_N": 64, "BLOCK_F": 256, "SLICE": 64, "OUTS": 4, "STAGES": 4}]
    return [{"GROUP": 4}, {"GROUP": 2}, {"GROUP": 16}, {"GROUP": 32}, *slices, *tall]


def multiply(x, w, b, h, a, dh, partial, size: dict) -> None:
    """The kernel; forward without dh. All tensors are contiguous."""
    (N, C), F, backward = x.shape, h.shape[1], dh is not None
    n, f, c, part = size["BLOCK_N"], size["BLOCK_F"], size["BLOCK_C"], size["SLICE"]
    x, w = (tensor if tensor.data_ptr() % 16 == 0 else tensor.clone() for tensor in (x, w))  # as TMA asks
    tiles = triton.cdiv(N, n) * triton.cdiv(F, f)
    bind_context()
    _mlp_gluon_kernel[(min(tiles, processors(x.device)),)](
        described(x, n, c),
        described(w, *((c, f) if backward else (f, c))),
        described(h, n, f // 2 if backward else part),
        described(a, n, part),
        described(dh, n, part),
        None if backward else b,
        partial,
        N,
        F,
        C,
        BACKWARD=backward,
        **size,
        num_warps=4,
        maxnreg=168,  # of 12 warps at the start; the producer's warpgroup then hands most of its own to the consumers
    )
