"""What Muon does before and after the op: one kernel each for the same matrix of all blocks.

    before    reads the gradient and the momentum; writes the momentum and the matrices to orthogonalise
    after     reads the result and the fp32 master; writes the master and the rounded weight

In bf16 these are 12 + 12 bytes a weight. In PyTorch, model/muon.py moves 102, including clipping and rounding.
Newton-Schulz transposes a matrix with more rows than columns. These kernels transpose the tile that they have loaded,
so the op needs no pass for it. On an H200 the op's transpositions took 0.34 ms of 1.38 for (12, 3072, 768) in bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import custom_op

BLOCK = 64  # rows and columns of a tile: each is 128 bytes in bf16, so transposed stores are coalesced, too


@triton.jit
def tile_offsets(stride, R, C, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return the offsets of this program's tile in matrices (R, C) that begin every `stride` elements, and the mask.

    Between them, return its offsets in a contiguous tensor, whose matrices are (C, R) if TRANSPOSED.
    """
    matrix = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    offsets = r.to(tl.int64) * C + c
    others = c.to(tl.int64) * R + r if TRANSPOSED else offsets
    start = matrix * C * R
    return matrix * stride + offsets, start + others, (r < R) & (c < C)


@triton.jit
def _muon_before_kernel(
    momentum_ptr,  # fp32; matrix j begins at j * stride
    gradient_ptr,  # as momentum
    out_ptr,  # contiguous
    scale_ptr,  # the scalars are on the device, so that a CUDA graph can contain the kernel
    refuse_ptr,
    stride,
    R,
    C,
    beta,
    one_minus_beta,
    BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    if not tl.load(refuse_ptr):
        at, out_at, inside = tile_offsets(stride, R, C, BLOCK, TRANSPOSED)
        gradient = tl.load(gradient_ptr + at, inside, other=0.0).to(tl.float32) * tl.load(scale_ptr)
        momentum = tl.load(momentum_ptr + at, inside, other=0.0)
        momentum += one_minus_beta * (gradient - momentum)
        tl.store(momentum_ptr + at, momentum, inside)
        direction = gradient + beta * (momentum - gradient)
        tl.store(out_ptr + out_at, direction.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _muon_after_kernel(
    master_ptr,  # fp32; matrix j begins at j * stride
    weight_ptr,  # as master
    step_ptr,  # contiguous
    lr_ptr,
    refuse_ptr,
    stride,
    R,
    C,
    length,
    weight_decay,
    BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    if not tl.load(refuse_ptr):
        at, step_at, inside = tile_offsets(stride, R, C, BLOCK, TRANSPOSED)
        lr = tl.load(lr_ptr)
        step = tl.load(step_ptr + step_at, inside, other=0.0).to(tl.float32)
        master = tl.load(master_ptr + at, inside, other=0.0)
        master -= lr * weight_decay * master
        master -= lr * length * step
        tl.store(master_ptr + at, master, inside)
        tl.store(weight_ptr + at, master.to(weight_ptr.dtype.element_ty), inside)


def launch(kernel: triton.JITFunction, matrices: Tensor, **arguments: Tensor | float) -> None:
    """Launch a kernel for matrices (n, R, C)."""
    n, R, C = matrices.shape
    tiles = triton.cdiv(R, BLOCK), triton.cdiv(C, BLOCK)
    sizes = {"stride": matrices.stride(0), "R": R, "C": C}
    kernel[(*tiles, n)](**arguments, **sizes, BLOCK=BLOCK, TRANSPOSED=R > C, num_warps=4)


def before(momentum: Tensor, gradient: Tensor, out: Tensor, scale: Tensor, refuse: Tensor, beta: float) -> None:
    tensors = {"momentum_ptr": momentum, "gradient_ptr": gradient, "out_ptr": out}
    scalars = {"scale_ptr": scale, "refuse_ptr": refuse, "beta": beta, "one_minus_beta": 1 - beta}
    launch(_muon_before_kernel, momentum, **tensors, **scalars)


def after(
    master: Tensor, weight: Tensor, steps: Tensor, lr: Tensor, refuse: Tensor, length: float, weight_decay: float
) -> None:
    tensors = {"master_ptr": master, "weight_ptr": weight, "step_ptr": steps}
    scalars = {"lr_ptr": lr, "refuse_ptr": refuse, "length": length, "weight_decay": weight_decay}
    launch(_muon_after_kernel, master, **tensors, **scalars)


_before = custom_op("hotswap::muon_before", before, lambda *_: None, mutates_args=("momentum", "out"))
_after = custom_op("hotswap::muon_after", after, lambda *_: None, mutates_args=("master", "weight"))


def update_momentum(
    momentum: Tensor, gradient: Tensor, scale: Tensor, refuse: Tensor, beta: float, dtype: torch.dtype
) -> Tensor:
    """Update the momentum (n, R, C) in place. Return Nesterov's direction for the op, contiguous, in `dtype`.

    The direction is (n, m, k) with m <= k, so it is transposed if R > C. momentum is fp32. gradient has the same
    strides, and each of the matrices is contiguous. `scale` () fp32 multiplies the gradient. If `refuse` () bool is
    true, nothing is written, and the result is undefined.
    """
    n, R, C = momentum.shape
    out = momentum.new_empty(n, min(R, C), max(R, C), dtype=dtype)
    _before(momentum, gradient, out, scale, refuse, beta)
    return out


def apply_steps(
    master: Tensor, weight: Tensor, steps: Tensor, lr: Tensor, refuse: Tensor, length: float, weight_decay: float
) -> None:
    """Subtract lr (length steps + weight_decay master) from master (n, R, C), and round the result to weight.

    master (fp32) and weight have the same strides, and contiguous matrices. steps has the shape of update_momentum()'s
    result. lr is () fp32. If `refuse` () bool is true, nothing changes.
    """
    _after(master, weight, steps.contiguous(), lr, refuse, length, weight_decay)
