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
        D = (qkv.shape[3],)  # the sums are in fp32, and so is the product that is rotated
        q, k = F.rms_norm(q.float(), D, q_weight.float(), eps), F.rms_norm(k.float(), D, k_weight.float(), eps)
    return torch.cat((rotate(q, table).to(qkv.dtype), rotate(k, table).to(qkv.dtype), v), dim=2)
