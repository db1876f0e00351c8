"""RMSNorm of residual + x, in plain PyTorch. Say here what the kernel does, why it is fast, and whose idea it is.

    x         (..., C)  the output of the last branch, in the compute dtype; the embedding if residual is None
    residual  (..., C)  the residual stream so far, in the dtype of x or a wider one; or None, for the first norm
    weight    (C,)      in the compute dtype

It returns (y, residual + x): y in the dtype of weight, the new residual stream in the dtype of the old one. The
contract is kernels/rms_norm/__init__.py.
"""

import torch
from torch import Tensor

# Your Triton kernel goes here. kernels/rms_norm/triton.py is an example, and kernels/README.md lists the steps.


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    residual = x if residual is None else residual + x
    h = residual.float()  # sums in bf16 would lose digits
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight
    return y.to(weight.dtype), residual
