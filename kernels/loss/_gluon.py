"""The softmax of triton.py for Hopper, in Gluon: a row waits in shared memory, so that the GPU's memory is read once.

There the second pass over a row is to find it in the L2. But three programs a multiprocessor with 100 KB each are
40 MB, and as much is on its way out: most of it is gone, and 65,536 rows of 50,304 took 4.7 ms for the three times 6.6
GB that a copy moves in 4.7. Here a program copies its whole row into shared memory, 98 KB of it asynchronously at once,
and has three passes there: the maximum, the sum of exponentials, the gradient. Two programs fit on a multiprocessor, so
that one fetches while the other computes. A thread reads what it has copied itself.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.hopper import barrier, copy

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK = gl.constexpr(4096)  # of a row's parts: 16 bytes a thread
WARPS = gl.constexpr(16)
ROW_BYTES = 108 * 1024  # two of them, and what the sums over threads take, are a multiprocessor's 227 KB
LEAST = 16384  # columns: below it nothing was measured


@gluon.jit
def _cross_entropy_gluon_kernel(
    logits_ptr,  # (n, V): their gradient replaces them
    targets_ptr,  # (n,) int64
    losses_ptr,  # (n,) fp32
    count_ptr,  # (1,) targets that count, of all chunks
    ignore_index,
    V: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    whole: gl.constexpr = V // BLOCK  # parts; and one more that V ends in
    parts: gl.constexpr = (V + BLOCK - 1) // BLOCK
    held = gl.allocate_shared_memory(logits_ptr.dtype.element_ty, [parts, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row = gl.program_id(0).to(gl.int64)
    logits_ptr += row * V
    columns = gl.arange(0, BLOCK, layout)
    rest = columns < V - whole * BLOCK
    for i in gl.static_range(whole):
        copy(held.index(i), logits_ptr + i * BLOCK + columns)
        async_copy.commit_group()
    if parts > whole:
        copy(held.index(whole), logits_ptr + whole * BLOCK + columns, mask=rest)
        async_copy.commit_group()
    target = gl.load(targets_ptr + row)
    counts = target != ignore_index
    exists = (target >= 0) & (target < V)
    wanted = gl.load(logits_ptr + gl.where(exists, target, 0)).to(gl.float32) * LOG2E
    wanted = gl.where(exists, wanted, float("nan"))
    count = gl.load(count_ptr).to(gl.float32)

    highest = gl.full((BLOCK,), -float("inf"), gl.float32, layout)
    for i in gl.static_range(whole):
        async_copy.wait_group(parts - 1 - i)
        highest = gl.maximum(highest, held.index(i).load(layout).to(gl.float32))
    if parts > whole:
        async_copy.wait_group(0)
        last = held.index(whole).load(layout).to(gl.float32)
        highest = gl.maximum(highest, gl.where(rest, last, -float("inf")))
    largest = gl.max(highest, 0) * LOG2E
    sums = gl.zeros((BLOCK,), gl.float32, layout)
    for i in range(whole):
        sums += gl.exp2(held.index(i).load(layout).to(gl.float32) * LOG2E - largest)
    if parts > whole:
        last = held.index(whole).load(layout).to(gl.float32)
        sums += gl.where(rest, gl.exp2(last * LOG2E - largest), 0.0)
    lse = largest + gl.log2(gl.sum(sums, 0))  # in base 2, as all here
    gl.store(losses_ptr + row, gl.where(counts, lse - wanted, 0.0) / LOG2E)
    shift = gl.where(counts, lse + gl.log2(count), float("inf"))  # the gradient of an ignored row is 0
    for i in range(whole):
        p = gl.exp2(held.index(i).load(layout).to(gl.float32) * LOG2E - shift)
        gl.store(logits_ptr + i * BLOCK + columns, p.to(logits_ptr.dtype.element_ty))
    if parts > whole:
        p = gl.exp2(held.index(whole).load(layout).to(gl.float32) * LOG2E - shift)
        gl.store(logits_ptr + whole * BLOCK + columns, p.to(logits_ptr.dtype.element_ty), mask=rest)
    barrier()
    right = gl.exp2(wanted - shift) - 1.0 / count
    gl.store(logits_ptr + target, right.to(logits_ptr.dtype.element_ty), mask=counts & exists)


def takes(V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it can, and is faster: Hopper, 16 bits, rows that are long and fit."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or dtype.itemsize != 2:
        return False
    return V % 8 == 0 and LEAST <= V and 2 * BLOCK.value * triton.cdiv(V, BLOCK.value) <= ROW_BYTES


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, count: Tensor, ignore_index: int) -> None:
    """As in triton.py, with gradients. The logits begin at a multiple of 16 bytes."""
    _cross_entropy_gluon_kernel[(len(logits),)](
        logits, targets, losses, count, ignore_index, V=logits.shape[1], num_warps=WARPS.value, maxnreg=64
    )
