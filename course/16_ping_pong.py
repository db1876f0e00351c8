"""Rung 16: two warpgroups take turns: one multiplies while the other computes GELU. In Gluon, on Hopper.

The first half of an MLP is gelu(x W^T). Its epilogue is GELU, rounding and store, and a warpgroup in its epilogue
starts no wgmma. So a program has two warpgroups, each with its own tiles (ping-pong in CUTLASS; arXiv:2407.08608):

    group 0   multiply tile 0 | epilogue of 0   | multiply tile 2 | epilogue of 2
    group 1                   | multiply tile 1 | epilogue of 1   | multiply tile 3

`turns` has an mbarrier for each group. After a group has started its last wgmma it completes a phase of the other
group's barrier. Before turn t group 1 waits for phase t of its barrier, and group 0 for phase t - 1, so group 0 begins.
The tensor cores wait only if an epilogue takes longer than a matmul. A tile does K = 768 FLOP for each byte of its
result: compute-bound. The programs are persistent: one runs on each multiprocessor and walks over tiles, so the loading
warp runs ahead into the next tile. A group skips the other group's loads. Without turns it could then find a slot two
rounds behind, whose last bit is the same. But a turn begins after all loads of the tile before have arrived.

Exercise: `solution(x, w)` returns h = x W^T and gelu(h). Four slots and two outputs of two groups exceed 227 KB of
shared memory, so both use one buffer. Store h before you compute gelu(h). Run `python course/16_ping_pong.py mine.py`.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

BLOCK, BLOCK_K, SLOTS, BARRIER = map(gl.constexpr, (128, 64, 4, hopper.mbarrier.MBarrierLayout()))
synchronize = getattr(gl, "thread_barrier", None) or gl.barrier  # its names in Triton 3.6 and 3.7


@gluon.jit
def load(x, w, work):
    xs, ws, full, empty, tiles, tiles_n, steps = work
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for step in range(steps):
            i = tile // gl.num_programs(0) * steps + step  # the number of the load in this program
            slot, phase = i % SLOTS, i // SLOTS % 2
            m, n, k = tile // tiles_n * BLOCK, tile % tiles_n * BLOCK, step * BLOCK_K
            hopper.mbarrier.wait(empty.index(slot), 1 - phase)
            hopper.mbarrier.expect(full.index(slot), 2 * BLOCK * BLOCK_K * 2)
            hopper.tma.async_copy_global_to_shared(x, [m, k], full.index(slot), xs.index(slot))
            hopper.tma.async_copy_global_to_shared(w, [n, k], full.index(slot), ws.index(slot))


@gluon.jit
def multiply(GROUP: gl.constexpr, GROUPS: gl.constexpr, y, out, turns, work):
    xs, ws, full, empty, tiles, tiles_n, steps = work
    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0) + GROUP * programs, tiles if GROUP < GROUPS else 0, GROUPS * programs):
        total = gl.zeros((BLOCK, BLOCK), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))
        first = tile // programs * steps  # the number of the tile's first load
        hopper.mbarrier.wait(turns.index(GROUP), (tile // programs // GROUPS + 1 - GROUP) % 2)  # group 0 begins
        for i in range(first, first + steps):
            slot, phase = i % SLOTS, i // SLOTS % 2
            hopper.mbarrier.wait(full.index(slot), phase)
            total = hopper.warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), total, is_async=True)
            total = hopper.warpgroup_mma_wait(1, deps=(total,))
            hopper.mbarrier.arrive(empty.index((i + SLOTS - 1) % SLOTS), pred=i > first)
        hopper.mbarrier.arrive(turns.index((GROUP + 1) % GROUPS))  # "one group": group 0 passes the turn to itself
        total = hopper.warpgroup_mma_wait(0, deps=(total,))
        hopper.mbarrier.arrive(empty.index((first + steps - 1) % SLOTS))
        gelu = total / (1 + gl.exp(-1.5957691 * total * (1 + 0.044715 * total * total)))  # rung 3
        hopper.tma.store_wait(0)  # TMA has read the tile before: out is free
        out.index(GROUP).store(gelu.to(y.dtype))
        hopper.fence_async_shared()
        synchronize()  # the threads of this group
        hopper.tma.async_copy_shared_to_global(y, [tile // tiles_n * BLOCK, tile % tiles_n * BLOCK], out.index(GROUP))
    hopper.tma.store_wait(0)


@gluon.jit
def mlp_kernel(x, w, y, tiles, tiles_n, steps, GROUPS: gl.constexpr):
    xs, ws = [gl.allocate_shared_memory(t.dtype, [SLOTS, BLOCK, BLOCK_K], t.layout) for t in (x, w)]
    out = gl.allocate_shared_memory(y.dtype, [2, BLOCK, BLOCK], y.layout)
    full, empty, turns = [gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER) for _ in (0, 1, 2)]
    for i in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=1)
        hopper.mbarrier.init(turns.index(i), count=1)  # the first two are used
    hopper.fence_async_shared()
    work = xs, ws, full, empty, tiles, tiles_n, steps
    group_0, group_1 = (0, GROUPS, y, out, turns, work), (1, GROUPS, y, out, turns, work)
    gl.warp_specialize([(multiply, group_0), (multiply, group_1), (load, (x, w, work))], [4, 1], [240, 24])


def mlp(x, w, groups):  # the sizes must be multiples of the tiles
    y = x.new_empty(len(x), len(w))
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    widths = (x, 64), (w, 64), (y, 128)  # of the tiles; the layout fits both
    tiles = [gluon.nvidia.hopper.TensorDescriptor.from_tensor(tensor, [128, n], layout) for tensor, n in widths]
    sizes = y.numel() // 128**2, len(w) // 128, x.shape[1] // 64
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    mlp_kernel[(programs,)](*tiles, *sizes, GROUPS=groups, num_warps=4, maxnreg=168)
    return y


def inputs(m, n, k, **options):
    return {"x": torch.randn(m, k, **options), "w": torch.randn(n, k, **options) / k**0.5}


def reference(x, w):
    return torch.nn.functional.gelu(x @ w.T, approximate="tanh")


def cost(m, n, k, dtype):
    return {"forward": (2 * m * n * k, (m * k + n * k + m * n) * dtype.itemsize)}


def exercise(x, w):
    return x @ w.T, reference(x, w)


NEEDS = "Hopper"
KERNELS = {"one group": lambda x, w: mlp(x, w, 1), "ping-pong": lambda x, w: mlp(x, w, 2)}
SHAPES = {"gpu": {"m": 65536, "n": 3072, "k": 768}}
if __name__ == "__main__":
    from climb import climb

    climb(__file__)
