"""Rotary positions in Helion (https://github.com/pytorch/helion), without a norm: one kernel, also for the backward.

It is the forward of triton.py in a dozen lines: a tile of tokens and heads in two halves, which rotates queries and
keys and copies the values. The size of the tiles is triton.py's before tuning; norm/helion.py says how to tune it.
"""

import torch
from torch import Tensor

from kernels.gpu import check_dtypes
from kernels.norm.helion import detail, unavailable  # noqa: F401
from kernels.rope._op import define_rope
from kernels.rope.triton import default_launch

RUNS = ("helion_rope",)


def rotate(qkv: Tensor, table: Tensor, kv_heads: int, inverse: bool) -> Tensor:
    """Do what kernels/rope/_op.py says."""
    from kernels.rope import _helion

    out, (B, T, heads, D) = torch.empty_like(qkv), qkv.shape
    launch = default_launch(D // 2)
    tokens = 1 if B * T == 1 else launch["BLOCK_T"]  # for a single row, Helion 1.5.0 omits the mask of rows
    kernel = _helion.kernel((tokens, launch["BLOCK_H"]), launch["num_warps"])
    x, y = (tensor.view(B * T, heads, 2, D // 2) for tensor in (qkv, out))
    kernel(x, table, y, heads - kv_heads, -1.0 if inverse else 1.0)
    return out


rotate_packed = define_rope("helion", rotate)


def rope(qkv: Tensor, table: Tensor, kv_heads: int) -> Tensor:
    check_dtypes("rope", qkv, impl="helion")
    return rotate_packed(qkv, table, kv_heads)
