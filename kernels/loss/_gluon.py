"""The softmax of _softmax.py for Hopper, in Gluon, with each row in shared memory, so that GPU memory is read once.

_softmax.py reads each row twice, and its second pass should find the row in the L2 cache. But each multiprocessor runs
three programs with a row of 100 KB each. These rows are 40 MB in all, and as many bytes are on their way to memory. So
most of a row has left the L2 before the second pass. 65,536 rows of 50,304, which are 6.6 GB, take 4.7 ms (receipts of
124M). At the copy rate of an H200 this is the time of three passes over memory: two reads and one write.

Here a program copies its whole row of 100 KB into shared memory. All copies are asynchronous and start at once. Three
passes over shared memory follow: the maximum, the sum of exponentials, and the gradient. Two programs fit on a
multiprocessor, so one can load its row while the other computes. Each thread reads only what it copied itself, so no
barrier is necessary between copy and read.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.hopper import barrier, copy

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK = gl.constexpr(4096)  # columns of one part of a row: 16 bytes a thread
WARPS = gl.constexpr(16)
MAX_ROW_BYTES = 108 * 1024  # so two rows, and the space for sums over threads, fit into the 227 KB of shared memory
MIN_COLUMNS = 16384  # narrower rows were not measured


@gluon.jit
def _cross_entropy_gluon_kernel(
    logits_ptr,  # (n, V); the kernel overwrites them with their gradient
    targets_ptr,  # (n,) int64
    losses_ptr,  # (n,) fp32
    count_ptr,  # (1,) number of targets other than ignore_index, in all chunks
    ignore_index,
    V: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    full_parts: gl.constexpr = V // BLOCK  # the number of full parts
    parts: gl.constexpr = (V + BLOCK - 1) // BLOCK  # the number of all parts; the last part may be partial
    row_parts = gl.allocate_shared_memory(
        logits_ptr.dtype.element_ty, [parts, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    row = gl.program_id(0).to(gl.int64)
    logits_ptr += row * V
    columns = gl.arange(0, BLOCK, layout)
    in_row = columns < V - full_parts * BLOCK  # for the last part, if it is partial
    for i in gl.static_range(full_parts):
        copy(row_parts.index(i), logits_ptr + i * BLOCK + columns)
        async_copy.commit_group()
    if parts > full_parts:
        copy(row_parts.index(full_parts), logits_ptr + full_parts * BLOCK + columns, mask=in_row)
        async_copy.commit_group()
    target = gl.load(targets_ptr + row)
    not_ignored = target != ignore_index
    in_vocab = (target >= 0) & (target < V)
    target_logit = gl.load(logits_ptr + gl.where(in_vocab, target, 0)).to(gl.float32) * LOG2E
    target_logit = gl.where(in_vocab, target_logit, float("nan"))
    count = gl.load(count_ptr).to(gl.float32)

    maxima = gl.full((BLOCK,), -float("inf"), gl.float32, layout)
    for i in gl.static_range(full_parts):
        async_copy.wait_group(parts - 1 - i)
        maxima = gl.maximum(maxima, row_parts.index(i).load(layout).to(gl.float32))
    if parts > full_parts:
        async_copy.wait_group(0)
        last = row_parts.index(full_parts).load(layout).to(gl.float32)
        maxima = gl.maximum(maxima, gl.where(in_row, last, -float("inf")))
    largest = gl.max(maxima, 0) * LOG2E
    sums = gl.zeros((BLOCK,), gl.float32, layout)
    for i in range(full_parts):
        sums += gl.exp2(row_parts.index(i).load(layout).to(gl.float32) * LOG2E - largest)
    if parts > full_parts:
        last = row_parts.index(full_parts).load(layout).to(gl.float32)
        sums += gl.where(in_row, gl.exp2(last * LOG2E - largest), 0.0)
    lse = largest + gl.log2(gl.sum(sums, 0))  # base 2, like all exponentials and logarithms here
    gl.store(losses_ptr + row, gl.where(not_ignored, lse - target_logit, 0.0) / LOG2E)
    shift = gl.where(not_ignored, lse + gl.log2(count), float("inf"))  # the gradient of an ignored row is 0
    for i in range(full_parts):
        p = gl.exp2(row_parts.index(i).load(layout).to(gl.float32) * LOG2E - shift)
        gl.store(logits_ptr + i * BLOCK + columns, p.to(logits_ptr.dtype.element_ty))
    if parts > full_parts:
        p = gl.exp2(row_parts.index(full_parts).load(layout).to(gl.float32) * LOG2E - shift)
        gl.store(logits_ptr + full_parts * BLOCK + columns, p.to(logits_ptr.dtype.element_ty), mask=in_row)
    barrier()
    target_grad = gl.exp2(target_logit - shift) - 1.0 / count
    gl.store(logits_ptr + target, target_grad.to(logits_ptr.dtype.element_ty), mask=not_ignored & in_vocab)


def supports(V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether to use this kernel: on Hopper, in 16-bit dtypes, for long rows that fit into shared memory."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or dtype.itemsize != 2:
        return False
    row_bytes = 2 * BLOCK.value * triton.cdiv(V, BLOCK.value)
    return V % 8 == 0 and V >= MIN_COLUMNS and row_bytes <= MAX_ROW_BYTES


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, count: Tensor, ignore_index: int) -> None:
    """Do what triton.py's cross_entropy_() does with write=True. The logits must start at a multiple of 16 bytes."""
    _cross_entropy_gluon_kernel[(len(logits),)](
        logits, targets, losses, count, ignore_index, V=logits.shape[1], num_warps=WARPS.value, maxnreg=64
    )
