"""The MLP of a block, in plain PyTorch. Say here what the kernel does, why it is fast, and whose idea it is.

    x       (..., C)
    w_fc    (F, C)     F = 4 C in GPT-2
    b_fc    (F,)       or None (model.bias=false)
    w_proj  (C, F)
    b_proj  (C,)       or None

All are in the compute dtype, and so is y (..., C). GELU is the tanh form. The contract, kernels/mlp/__init__.py, also
has the argument fp8; without it the kernel is refused for precision=fp8.
"""

import math

import torch
from torch import Tensor

# Your Triton kernel goes here; kernels/mlp/triton.py is an example.
#   1. the kernels: functions with @triton.jit
#   2. a launcher for the forward and one for the backward: each a torch.library.custom_op with a fake, which
#      torch.compile needs; kernels.direct.bypass_dispatcher() connects them to autograd
#   3. from kernels.gpu import triton_unavailable as unavailable, which says where Triton cannot run
#   4. RUNS = ("name of a kernel",), which proof=true looks for in the profile of a step
# Then call the launcher in mlp().


def mlp(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    h = x @ w_fc.T
    h = h if b_fc is None else h + b_fc
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    y = h @ w_proj.T
    return y if b_proj is None else y + b_proj
