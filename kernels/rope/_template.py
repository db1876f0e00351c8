"""Rotary positions in plain PyTorch. Say here what the kernel does, why it is fast, and whose idea it is.

    qkv       (B, T, H + 2 Hkv, D)  queries, keys and values side by side, in the compute dtype
    table     (2, T, 1, D/2) or (2, B, T, 1, D/2)  fp32: cosines and sines
    kv_heads  Hkv
    q_weight, k_weight  (D,)  or None; otherwise each query and key is first normalised by RMSNorm (model.qk_norm)

It returns a tensor like qkv whose queries and keys are rotated: pairs of channels i and i + D/2. The contract is
kernels/rope/__init__.py. A kernel without the last three arguments is refused only for model.qk_norm=true.
"""

import torch
from torch import Tensor

# Your Triton kernel goes here. kernels/rope/triton.py is an example, and kernels/README.md lists the steps.


def rope(
    qkv: Tensor,
    table: Tensor,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    q, k, v = qkv.split((qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    cos, sin = table
    rotated = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        x = x.float()
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        a, b = x.chunk(2, dim=-1)
        rotated.append(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(qkv.dtype))
    return torch.cat((*rotated, v), dim=2)
