"""The MLP of a block, in plain PyTorch. Say here what the kernel does, why it is fast, and whose idea it is.

    x       (..., C)
    w_fc    (F, C)     F = 4 C in GPT-2
    b_fc    (F,)       or None (model.bias=false)
    w_proj  (C, F)
    b_proj  (C,)       or None

All are in the compute dtype, and so is y (..., C). GELU is the tanh form; the other activation is relu(h)^2. The
contract, kernels/mlp/__init__.py, also has the argument fp8; without it the kernel is refused for precision=fp8.
"""

import math

import torch
from torch import Tensor

# Your Triton kernel goes here. kernels/mlp/triton.py is an example, and kernels/README.md lists the steps.


def mlp(
    x: Tensor,
    w_fc: Tensor,
    b_fc: Tensor | None,
    w_proj: Tensor,
    b_proj: Tensor | None,
    activation: str = "gelu",
) -> Tensor:
    h = x @ w_fc.T
    h = h if b_fc is None else h + b_fc
    if activation == "gelu":
        a = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    else:
        a = torch.relu(h).square()
    y = a @ w_proj.T
    return y if b_proj is None else y + b_proj
