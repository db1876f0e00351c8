"""Rung 15: two warpgroups take turns: one multiplies while the other computes GELU. In Gluon, on Hopper.

The first half of an MLP is gelu(x W^T). GELU, rounding and store of a tile are its epilogue, and a warpgroup in its
epilogue starts no wgmma. So this program has two warpgroups, and each has its own tile:

    group 0   multiply tile 0 | epilogue of 0   | multiply tile 2 | epilogue of 2
    group 1                   | multiply tile 1 | epilogue of 1   | multiply tile 3

A barrier for each group says that its turn begins. A group passes the turn on after it has started its last wgmma, so
the tensor cores wait only if an epilogue takes longer than a matmul. A tile does K = 768 FLOP for each byte of its
result, so its store fits beside a matmul. CUTLASS calls this ping-pong, and FlashAttention-3 has it (arXiv:2407.08608).

The programs are persistent: one runs on each multiprocessor and walks over tiles, so the loading warp runs ahead into
the next tile. A group skips the loads of the other group. The turns make that safe: a wait knows only the phase and
passes too early on a slot two rounds behind, but a turn begins after all loads of the tile before have arrived.

Exercise: return h = x W^T and gelu(h), as in `exercise`. Four slots and two outputs of two groups exceed the 227 KB of
shared memory, so let h and gelu(h) pass through one buffer. Run `python course/15_ping_pong.py mine.py`.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK, BLOCK_K, SLOTS = gl.constexpr(128), gl.constexpr(64), gl.constexpr(4)
synchronize = getattr(gl, "thread_barrier", None) or gl.barrier  # its names in Triton 3.6 and 3.7


@gluon.jit
def load(x, w, work):
    xs, ws, full, empty, tiles, tiles_n, steps = work
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for step in range(steps):
            i = tile // gl.num_programs(0) * steps + step  # the number of the load
            slot, phase = i % SLOTS, i // SLOTS % 2
            m, n, k = tile // tiles_n * BLOCK, tile % tiles_n * BLOCK, step * BLOCK_K
            hopper.mbarrier.wait(empty.index(slot), 1 - phase)
            hopper.mbarrier.expect(full.index(slot), 2 * BLOCK * BLOCK_K * 2)
            hopper.tma.async_copy_global_to_shared(x, [m, k], full.index(slot), xs.index(slot))
            hopper.tma.async_copy_global_to_shared(w, [n, k], full.index(slot), ws.index(slot))


@gluon.jit
def multiply(GROUP: gl.constexpr, GROUPS: gl.constexpr, y, out, turns, work):
    xs, ws, full, empty, tiles, tiles_n, steps = work
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0) + GROUP * programs, tiles if GROUP < GROUPS else 0, GROUPS * programs):
        total = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
        first = tile // programs * steps  # the number of the tile's first load
        # tile // programs // GROUPS is the number of the turn; the first turn of group 0 begins at once
        hopper.mbarrier.wait(turns.index(GROUP), (tile // programs // GROUPS + 1 - GROUP) % 2)
        for i in range(first, first + steps):
            slot, phase = i % SLOTS, i // SLOTS % 2
            hopper.mbarrier.wait(full.index(slot), phase)
            total = hopper.warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), total, is_async=True)
            total = hopper.warpgroup_mma_wait(1, deps=(total,))
            hopper.mbarrier.arrive(empty.index((i + SLOTS - 1) % SLOTS), pred=i > first)
        hopper.mbarrier.arrive(turns.index((GROUP + 1) % GROUPS))  # a single group passes the turn to itself
        total = hopper.warpgroup_mma_wait(0, deps=(total,))
        hopper.mbarrier.arrive(empty.index((first + steps - 1) % SLOTS))
        gelu = total / (1 + gl.exp(-1.5957691 * total * (1 + 0.044715 * total * total)))  # the tanh form
        hopper.tma.store_wait(0)  # TMA has read the tile before
        out.index(GROUP).store(gelu.to(y.dtype))
        hopper.fence_async_shared()
        synchronize()  # the threads of this group
        hopper.tma.async_copy_shared_to_global(y, [tile // tiles_n * BLOCK, tile % tiles_n * BLOCK], out.index(GROUP))
    hopper.tma.store_wait(0)


@gluon.jit
def mlp_kernel(x, w, y, tiles, tiles_n, steps, GROUPS: gl.constexpr):
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS, BLOCK, BLOCK_K], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [SLOTS, BLOCK, BLOCK_K], w.layout)
    out = gl.allocate_shared_memory(y.dtype, [2, BLOCK, BLOCK], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())  # the first two are used
    for i in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=1)
        hopper.mbarrier.init(turns.index(i), count=1)
    hopper.fence_async_shared()
    work = xs, ws, full, empty, tiles, tiles_n, steps
    group_0, group_1 = (0, GROUPS, y, out, turns, work), (1, GROUPS, y, out, turns, work)
    gl.warp_specialize([(multiply, group_0), (multiply, group_1), (load, (x, w, work))], [4, 1], [240, 24])


def mlp(x, w, groups):
    y = x.new_empty(len(x), len(w))
    tiles_m, tiles_n, steps = len(x) // 128, len(w) // 128, x.shape[1] // 64  # the sizes must be multiples
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)  # also for 128 x 128
    blocks = ((x, [128, 64]), (w, [128, 64]), (y, [128, 128]))
    tiles = (TensorDescriptor.from_tensor(tensor, block, layout) for tensor, block in blocks)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    mlp_kernel[(programs,)](*tiles, tiles_m * tiles_n, tiles_n, steps, GROUPS=groups, num_warps=4, maxnreg=168)
    return y


KERNELS = {"one group": lambda x, w: mlp(x, w, 1), "ping-pong": lambda x, w: mlp(x, w, 2)}
SHAPES = {"gpu": {"m": 65536, "n": 3072, "k": 768}}


def unavailable(device):
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return None if is_hopper else "it needs a Hopper GPU, of compute capability 9.0"


def inputs(m, n, k, dtype, device):
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device) / k**0.5
    return {"x": x.to(dtype), "w": w.to(dtype)}


def reference(x, w):
    return torch.nn.functional.gelu(x @ w.T, approximate="tanh")


def cost(m, n, k, dtype):
    return {"forward": (2 * m * n * k, (m * k + n * k + m * n) * dtype.itemsize)}


def exercise(x, w):
    return x @ w.T, reference(x, w)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
