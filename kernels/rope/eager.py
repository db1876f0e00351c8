"""Rotary positions in plain PyTorch: some ten passes over the queries and keys, which torch.compile makes into one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.rope import rotate


def rope(
    qkv: Tensor,
    table: Tensor,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    q, k, v = qkv.split((qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    if q_weight is not None:
        D, dtype = (qkv.shape[3],), torch.promote_types(qkv.dtype, torch.float32)  # rotate() gets unrounded products
        q = F.rms_norm(q.to(dtype), D, q_weight.to(dtype), eps)
        k = F.rms_norm(k.to(dtype), D, k_weight.to(dtype), eps)
    return torch.cat((rotate(q, table).to(qkv.dtype), rotate(k, table).to(qkv.dtype), v), dim=2)
