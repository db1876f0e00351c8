"""The gated MLP of a block, in plain PyTorch. Say here what the kernel does, why it is fast, and whose idea it is.

    x       (..., C)
    w_fc    (2 F, C)   the rows of the gate, then the rows of up
    b_fc    (2 F,)     or None (model.bias=false)
    w_proj  (C, F)
    b_proj  (C,)       or None

All are in the compute dtype, and so is y (..., C). The contract, kernels/glu/__init__.py, also has the argument fp8;
without it the kernel is refused for precision=fp8.
"""

import torch
from torch import Tensor

# Your Triton kernel goes here. kernels/glu/triton.py is an example, and kernels/README.md lists the steps.


def glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    h = x @ w_fc.T
    gate, up = (h if b_fc is None else h + b_fc).chunk(2, -1)
    y = (gate * torch.sigmoid(gate) * up) @ w_proj.T
    return y if b_proj is None else y + b_proj
