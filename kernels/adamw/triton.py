"""One step of AdamW over all weights in one kernel, which accesses each tensor once.

It reads the gradient, the fp32 master and both moments, and writes the master, both moments and the rounded weight. In
bf16 these are 28 bytes a weight. PyTorch's fused AdamW needs gradients in fp32, and clipping and rounding are passes of
their own: together 42 bytes a weight. On one H200, the 124M weights take 0.85 ms, and eager.py 2.64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adamw import CHANGED, MULTIPLE
from kernels.direct import custom_op
from kernels.gpu import check_dtypes
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401

BLOCK = MULTIPLE  # elements of a program: 8 for each thread
RUNS = ("^_adamw_kernel|::adamw",)


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


def launch(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor,
    gradient: Tensor,
    lr: Tensor,
    scale: Tensor,
    updates: Tensor,
    refuse: Tensor,
    decayed: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    check_dtypes("adamw", weight, gradient)
    _adamw_kernel[(len(master) // BLOCK,)](
        master_ptr=master,
        exp_avg_ptr=exp_avg,
        exp_avg_sq_ptr=exp_avg_sq,
        weight_ptr=weight,
        gradient_ptr=gradient,
        lr_ptr=lr,
        scale_ptr=scale,
        # From fp64, because 1 - beta^t loses digits in fp32
        corrections_ptr=torch.stack([1 - beta1**updates, 1 - beta2**updates]).float(),
        refuse_ptr=refuse,
        decayed=decayed,
        beta1=beta1,
        beta2=beta2,
        one_minus_beta1=1 - beta1,
        one_minus_beta2=1 - beta2,
        eps=eps,
        weight_decay=weight_decay,
        BLOCK=BLOCK,
        num_warps=4,
    )


adamw = custom_op("hotswap::adamw", launch, lambda *_: None, mutates_args=CHANGED)
