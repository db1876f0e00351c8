"""One step of AdamW over all weights in one kernel, which accesses each tensor once.

All tensors are flat and have the same length: the weights of a model one after another. A step reads the gradient, the
fp32 master weight and two moments, and writes the three, and the weight in its lower dtype. In bf16 these are 28 bytes
a weight. PyTorch's fused AdamW needs gradients in fp32, and clipping and rounding are passes of their own: together 42
bytes a weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import bypass_dispatcher

BLOCK = 1024  # elements of a program: 8 for each thread


@triton.jit
def _adamw_kernel(
    master_ptr,  # (n,) fp32
    exp_avg_ptr,  # (n,) fp32
    exp_avg_sq_ptr,  # (n,) fp32
    weight_ptr,  # (n,), the rounded master
    gradient_ptr,  # (n,)
    lr_ptr,  # the scalars are on the device, so that a CUDA graph can contain the kernel
    scale_ptr,
    corrections_ptr,
    refuse_ptr,
    decayed,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,  # for 0.999, a difference in fp32 would be off by 1e-5 of itself
    eps,
    weight_decay,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # no mask, so that each load is 16 bytes
    if not tl.load(refuse_ptr):
        lr, scale = tl.load(lr_ptr), tl.load(scale_ptr)
        correction1, correction2 = tl.load(corrections_ptr), tl.load(corrections_ptr + 1)
        gradient = tl.load(gradient_ptr + i).to(tl.float32) * scale
        exp_avg = beta1 * tl.load(exp_avg_ptr + i) + one_minus_beta1 * gradient
        exp_avg_sq = beta2 * tl.load(exp_avg_sq_ptr + i) + one_minus_beta2 * gradient * gradient
        master = tl.load(master_ptr + i)
        master -= lr * tl.where(i < decayed, weight_decay, 0.0) * master
        master -= lr * (exp_avg / correction1) / (tl.sqrt(exp_avg_sq / correction2) + eps)
        tl.store(exp_avg_ptr + i, exp_avg)
        tl.store(exp_avg_sq_ptr + i, exp_avg_sq)
        tl.store(master_ptr + i, master)
        tl.store(weight_ptr + i, master.to(weight_ptr.dtype.element_ty))


@torch.library.custom_op("hotswap::adamw", mutates_args=("master", "exp_avg", "exp_avg_sq", "weight"))
def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor,
    gradient: Tensor,
    lr: Tensor,
    scale: Tensor,
    corrections: Tensor,
    refuse: Tensor,
    decayed: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update master, exp_avg and exp_avg_sq, (n,) fp32, in place, and store the rounded master in `weight` (n,).

    n must be a multiple of BLOCK. `gradient` (n,) is multiplied by `scale`. `corrections` are 1 - beta1^t and
    1 - beta2^t. They, lr and scale are fp32. The first `decayed` weights decay. If the bool `refuse` is true, nothing
    changes.
    """
    rest = 1 - beta1, 1 - beta2, eps, weight_decay
    tensors = master, exp_avg, exp_avg_sq, weight, gradient, lr, scale, corrections, refuse
    _adamw_kernel[(len(master) // BLOCK,)](*tensors, decayed, beta1, beta2, *rest, BLOCK=BLOCK, num_warps=4)


@adamw.register_fake
def _(*arguments):
    return None


adamw = bypass_dispatcher(adamw)
