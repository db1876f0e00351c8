"""Rung 15: a matmul in Gluon for Hopper: one warp loads tiles into a ring, four warps multiply them.

Two units of Hopper (H100, H200) work while the threads that start them go on. TMA copies a tile between memory and
shared memory; one thread starts it with a descriptor: the tensor's address, shape and strides. wgmma multiplies two
tiles of shared memory; a warpgroup, four warps, starts it and holds the sums. Triton gives all warps the same code.
Gluon, the language below it, gives them roles: one warp loads, a warpgroup multiplies (Bauer et al. 2011, CudaDMA).

The roles share a ring of 3 slots: load i goes to slot i % 3, in round i // 3. Each slot has two mbarriers, objects in
shared memory. In each round `full` completes a phase when TMA has written the slot, and `empty` when the warpgroup has
read it. A wait names only the last bit of a round: it lasts until the phase completed last has this bit. Before round 0
the bit is 1. A wrong bit is a deadlock, or a slot that is overwritten too early.

A tile of 128 x 128 does 64 FLOP for each byte it loads, mostly from the L2. From memory most bytes come once, so the
matmul is compute-bound. Two programs share a multiprocessor: one multiplies while the other starts or stores.

Exercise: the gated linear unit `exercise`, as `solution(x, w)`. A slot gets 128 rows of x and 64 of each half of w, and
the threads hold two sums of 128 x 64. sigmoid(b) is 1 / (1 + gl.exp(-b)). Run `python course/15_tma_ring.py mine.py`.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

BLOCK, BLOCK_K, SLOTS = gl.constexpr(128), gl.constexpr(64), gl.constexpr(3)
synchronize = getattr(gl, "thread_barrier", None) or gl.barrier  # its names in Triton 3.6 and 3.7


@gluon.jit
def load(x, w, y, xs, ws, full, empty, m, n, steps):
    for i in range(steps):
        slot, phase = i % SLOTS, i // SLOTS % 2
        hopper.mbarrier.wait(empty.index(slot), 1 - phase)  # the round before has the other bit. Round 0 does not wait
        hopper.mbarrier.expect(full.index(slot), 2 * BLOCK * BLOCK_K * 2)  # arrives; the phase needs these bytes, too
        hopper.tma.async_copy_global_to_shared(x, [m, i * BLOCK_K], full.index(slot), xs.index(slot))
        hopper.tma.async_copy_global_to_shared(w, [n, i * BLOCK_K], full.index(slot), ws.index(slot))


@gluon.jit
def multiply(x, w, y, xs, ws, full, empty, m, n, steps):  # wgmma's sums: 4 x 1 warps, each 16 x BLOCK at once
    total = gl.zeros((BLOCK, BLOCK), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))
    for i in range(steps):
        slot, phase = i % SLOTS, i // SLOTS % 2
        hopper.mbarrier.wait(full.index(slot), phase)
        total = hopper.warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), total, is_async=True)
        total = hopper.warpgroup_mma_wait(1, deps=(total,))  # all but 1 wgmma are complete: load i - 1 is read
        hopper.mbarrier.arrive(empty.index((i + SLOTS - 1) % SLOTS), pred=i > 0)  # its slot may be written again
    total = hopper.warpgroup_mma_wait(0, deps=(total,))
    left, right = total.to(y.dtype).reshape((BLOCK, 2, BLOCK_K)).permute((0, 2, 1)).split()
    xs.index(0).store(left)  # all slots are read, so two of them can hold the halves of y's tile
    xs.index(1).store(right)
    hopper.fence_async_shared()  # TMA will see what this thread has written
    synchronize()  # every thread of the warpgroup has passed its fence
    hopper.tma.async_copy_shared_to_global(y, [m, n], xs.index(0))
    hopper.tma.async_copy_shared_to_global(y, [m, n + BLOCK_K], xs.index(1))
    hopper.tma.store_wait(0)  # the program may end when TMA has read the shared memory


@gluon.jit
def matmul_kernel(x, w, y, tiles_n, steps):
    xs, ws = [gl.allocate_shared_memory(t.dtype, [SLOTS, BLOCK, BLOCK_K], t.layout) for t in (x, w)]
    full, empty = [gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout()) for _ in (0, 1)]
    for slot in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(slot), count=1)  # a phase needs one arrival
        hopper.mbarrier.init(empty.index(slot), count=1)
    hopper.fence_async_shared()  # TMA will see the barriers
    m, n = gl.program_id(0) // tiles_n * BLOCK, gl.program_id(0) % tiles_n * BLOCK
    work = x, w, y, xs, ws, full, empty, m, n, steps
    gl.warp_specialize([(multiply, work), (load, work)], [1], [24])  # load: one more warp, 24 registers a thread


def matmul(x, w):  # the sizes must be multiples of the tiles. maxnreg=128 lets two programs share a multiprocessor
    y = x.new_empty(len(x), len(w))
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)  # of a tile in shared memory
    tiles = [gluon.nvidia.hopper.TensorDescriptor.from_tensor(tensor, [128, 64], layout) for tensor in (x, w, y)]
    matmul_kernel[(y.numel() // 128**2,)](*tiles, len(w) // 128, x.shape[1] // 64, num_warps=4, maxnreg=128)
    return y


def inputs(m, n, k, **options):
    return {"x": torch.randn(m, k, **options), "w": torch.randn(n, k, **options) / k**0.5}


def reference(x, w):
    return x @ w.T


def cost(m, n, k, dtype):
    return {"forward": (2 * m * n * k, (m * k + n * k + m * n) * dtype.itemsize)}


def exercise(x, w):
    return torch.nn.functional.glu(x @ w.T)  # a, b = the halves of the columns; a sigmoid(b)


NEEDS = "Hopper"
KERNELS = {"gluon": matmul}
SHAPES = {"gpu": {"m": 65536, "n": 2304, "k": 768}}
if __name__ == "__main__":
    from climb import climb

    climb(__file__)
