"""Rung 14: a matmul in Gluon for Hopper: one warp loads tiles into a ring, four warps multiply them.

Two units of Hopper work while the threads do something else. TMA copies a tile from memory to shared memory; one thread
starts it with a descriptor, which has the tensor's address, shape and strides. wgmma multiplies two tiles of shared
memory; a warpgroup, four warps, starts it and holds the sums in registers. So one warp loads while a warpgroup
multiplies. Between them is a ring of slots with two barriers each: `full` is complete when TMA has written the slot,
and `empty` when the warpgroup has read it. Load i goes to slot i % 3 in round i // 3. A wait names the phase, the last
bit of the round, and lasts until a round with this bit is complete.

Triton gives all warps the same code. Gluon, the dialect below Triton, gives them roles. The programmer states barriers,
shared memory and layouts, and a mistake is a deadlock. Warps that only load are an idea of Bauer et al. 2011 (CudaDMA).
A tile of 128 x 128 does 64 FLOP for each byte it loads, mostly from the L2 cache. From memory most bytes come once, so
the matmul is compute-bound. A program multiplies nothing while it loads its first tiles or stores its result, so two
programs share a multiprocessor, with slots of 96 KB each.

Exercise: a gated linear unit, as in `exercise`. A slot gets three tiles, and the threads hold two sums, of
128 x 64 each to keep the bytes of a slot and the registers. Run `python course/14_tma_ring.py mine.py`.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK, BLOCK_K, SLOTS = gl.constexpr(128), gl.constexpr(64), gl.constexpr(3)
synchronize = getattr(gl, "thread_barrier", None) or gl.barrier  # its names in Triton 3.6 and 3.7


@gluon.jit
def load(x, w, xs, ws, full, empty, m, n, steps):
    for i in range(steps):
        slot, phase = i % SLOTS, i // SLOTS % 2
        hopper.mbarrier.wait(empty.index(slot), 1 - phase)  # for the round before; in round 0 it passes at once
        hopper.mbarrier.expect(full.index(slot), 2 * BLOCK * BLOCK_K * 2)  # this many bytes complete the round
        hopper.tma.async_copy_global_to_shared(x, [m, i * BLOCK_K], full.index(slot), xs.index(slot))
        hopper.tma.async_copy_global_to_shared(w, [n, i * BLOCK_K], full.index(slot), ws.index(slot))


@gluon.jit
def multiply(y, xs, ws, full, empty, m, n, steps):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])  # the thread of each sum
    total = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
    for i in range(steps):
        slot, phase = i % SLOTS, i // SLOTS % 2
        hopper.mbarrier.wait(full.index(slot), phase)
        total = hopper.warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), total, is_async=True)
        total = hopper.warpgroup_mma_wait(1, deps=(total,))  # one wgmma runs on; the wgmma of load i - 1 is complete
        hopper.mbarrier.arrive(empty.index((i + SLOTS - 1) % SLOTS), pred=i > 0)
    total = hopper.warpgroup_mma_wait(0, deps=(total,))
    left, right = total.to(y.dtype).reshape((BLOCK, 2, BLOCK_K)).permute((0, 2, 1)).split()
    xs.index(0).store(left)  # all slots are read, so two of them can hold the tile of y
    xs.index(1).store(right)
    hopper.fence_async_shared()  # TMA will see what this thread has written
    synchronize()  # every thread of the warpgroup has passed its fence
    hopper.tma.async_copy_shared_to_global(y, [m, n], xs.index(0))
    hopper.tma.async_copy_shared_to_global(y, [m, n + BLOCK_K], xs.index(1))
    hopper.tma.store_wait(0)  # the program may end when TMA has read the shared memory


@gluon.jit
def matmul_kernel(x, w, y, tiles_n, steps):
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS, BLOCK, BLOCK_K], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [SLOTS, BLOCK, BLOCK_K], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(slot), count=1)  # one arrival completes a round
        hopper.mbarrier.init(empty.index(slot), count=1)
    hopper.fence_async_shared()  # TMA will see the barriers
    m, n = gl.program_id(0) // tiles_n * BLOCK, gl.program_id(0) % tiles_n * BLOCK
    gl.warp_specialize(  # the second role has one warp beside the program's four, and 24 registers a thread
        [(multiply, (y, xs, ws, full, empty, m, n, steps)), (load, (x, w, xs, ws, full, empty, m, n, steps))], [1], [24]
    )


def matmul(x, w):
    y = x.new_empty(len(x), len(w))
    tiles_m, tiles_n = len(x) // 128, len(w) // 128  # the sizes must be multiples of the tiles
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    descriptors = (TensorDescriptor.from_tensor(tensor, [128, 64], layout) for tensor in (x, w, y))
    matmul_kernel[(tiles_m * tiles_n,)](*descriptors, tiles_n, x.shape[1] // 64, num_warps=4, maxnreg=128)
    return y


KERNELS = {"gluon": matmul}
SHAPES = {"gpu": {"m": 65536, "n": 2304, "k": 768}}


def unavailable(device):
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return None if is_hopper else "it needs a Hopper GPU, of compute capability 9.0"


def inputs(m, n, k, dtype, device):
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device) / k**0.5
    return {"x": x.to(dtype), "w": w.to(dtype)}


def reference(x, w):
    return x @ w.T


def cost(m, n, k, dtype):
    return {"forward": (2 * m * n * k, (m * k + n * k + m * n) * dtype.itemsize)}


def exercise(x, w):
    return torch.nn.functional.glu(x @ w.T)  # a, b = the halves of the columns; a sigmoid(b)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
