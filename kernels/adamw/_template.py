"""One update of all weights by AdamW, in plain PyTorch. Say here what the kernel does and why it is fast.

    master, exp_avg, exp_avg_sq  (n,) fp32, changed in place: the weights, and the means of gradients and of squares
    weight      (n,)     changed in place: the model's weights, the rounded master
    gradient    (n,)     multiplied by `scale` before use
    lr, scale   () fp32  the learning rate, and the factor of the gradient
    updates     () fp64  the number of this update, from 1
    refuse      () bool  true: nothing changes
    decayed     int      the first `decayed` weights decay

A GPU replays the update from a CUDA graph, so the host must not read a tensor. PyTorch updates fp32 weights, so a run
needs precision=bf16 to call this file. The contract is kernels/adamw/__init__.py.
"""

import torch
from torch import Tensor

# Your Triton kernel goes here. kernels/adamw/triton.py is an example, and kernels/README.md lists the steps.


def adamw(
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
    gradient = gradient.to(master.dtype) * scale
    mean = beta1 * exp_avg + (1 - beta1) * gradient
    mean_of_squares = beta2 * exp_avg_sq + (1 - beta2) * gradient.square()
    corrected, corrected_squares = mean / (1 - beta1**updates), mean_of_squares / (1 - beta2**updates)
    decay = weight_decay * (torch.arange(len(master), device=master.device) < decayed)
    new = master - lr * (decay * master + corrected / (corrected_squares.sqrt() + eps))
    for state, value in ((master, new), (exp_avg, mean), (exp_avg_sq, mean_of_squares), (weight, new)):
        state.copy_(torch.where(refuse, state, value.to(state.dtype)))
