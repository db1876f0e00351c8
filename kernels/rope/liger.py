"""The rotary positions of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989), without a norm of queries and keys.

Liger's kernel rotates contiguous queries and keys in place, and a program takes all heads of a token. The contract
packs queries, keys and values, and no input is overwritten. So this file first copies the queries and the keys, and
then joins the results and the values. For GPT-2's heads that moves 2.3 times the bytes of triton.py: the copies and the
rotation move two thirds of qkv each, and the last pass moves all of it.
"""

import torch
from torch import Tensor

from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.norm.liger import detail  # noqa: F401
from kernels.rope._op import define_rope

RUNS = ("_triton_rope|liger_rope",)


def unavailable(device: torch.device) -> str | None:
    # this function came with the argument rotary_dim
    missing = package_unavailable("liger-kernel>=0.8.5", "liger_kernel.ops.rope._resolve_rotary_dim")
    return missing or gpu_unavailable(device)


def rotate(qkv: Tensor, table: Tensor, kv_heads: int, inverse: bool) -> Tensor:
    """Do what kernels/rope/_op.py says."""
    from liger_kernel.ops.rope import rope_backward, rope_forward

    _, T, heads, D = qkv.shape
    *parts, v = qkv.split((heads - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    # Liger copies only what is not contiguous: it would write over the queries of a single token
    q, k = (part.clone(memory_format=torch.contiguous_format).transpose(1, 2) for part in parts)
    cos, sin = table.unflatten(1, (-1, T))
    q, k, *_ = (rope_backward if inverse else rope_forward)(q, k, cos, sin, rotary_dim=D)
    return torch.cat((q.transpose(1, 2), k.transpose(1, 2), v), dim=2)


rotate_packed = define_rope("liger", rotate)


def rope(qkv: Tensor, table: Tensor, kv_heads: int) -> Tensor:
    return rotate_packed(qkv, table, kv_heads)
