"""LayerNorm of residual + x, in plain PyTorch. Say here what the kernel does, why it is fast, and whose idea it is.

    x         (..., C)  the output of the last branch, in the compute dtype; the embedding if residual is None
    residual  (..., C)  the residual stream so far, in the dtype of x or a wider one; or None, for the first norm
    weight    (C,)      in the compute dtype
    bias      (C,)      or None (model.bias=false)

It returns (y, residual + x): y in the dtype of weight, the new residual stream in the dtype of the old one. The
contract is kernels/norm/__init__.py.
"""

import torch
from torch import Tensor

# Your Triton kernel goes here. kernels/norm/triton.py is an example, and kernels/README.md lists the steps.


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    residual = x if residual is None else residual + x
    h = residual.float()  # sums in bf16 would lose digits
    mean = h.mean(-1, keepdim=True)
    rstd = torch.rsqrt((h - mean).square().mean(-1, keepdim=True) + eps)
    y = (h - mean) * rstd * weight
    return (y if bias is None else y + bias).to(weight.dtype), residual
