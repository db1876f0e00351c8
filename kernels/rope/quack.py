"""QuACK's rotary positions in CuTe DSL (https://github.com/Dao-AILab/quack), without a norm of queries and keys.

QuACK's apply_rotary_emb_qkv_() rotates packed queries and keys in place, so it needs a copy of qkv. The operator below
it reads one tensor and writes another, with any strides. This file calls the operator for queries and keys, and copies
the values, so it moves as many bytes as triton.py in two kernels.

QuACK has one table for all sequences. If each sequence has its own positions, this file passes all of them as one
sequence of B T tokens.
"""

import torch
from torch import Tensor

from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.quack import PACKAGE, detail  # noqa: F401
from kernels.registry import Unavailable
from kernels.rope._op import define_rope

RUNS = ("(?i)rotary|quack_rope",)


def unavailable(device: torch.device) -> str | None:
    missing = package_unavailable(PACKAGE, "quack.rotary._rotary_fwd_out")
    return missing or gpu_unavailable(device, (9, 0))


def rotate(qkv: Tensor, table: Tensor, kv_heads: int, inverse: bool) -> Tensor:
    """Do what kernels/rope/_op.py says."""
    from quack.rotary import _rotary_fwd_out

    out, (cos, sin), T = torch.empty_like(qkv), table, table.shape[1]
    rows, out_rows = (tensor.view(-1, T, *tensor.shape[2:]) for tensor in (qkv, out))
    turned = qkv.shape[2] - kv_heads
    out[:, :, turned:] = qkv[:, :, turned:]
    # the arguments after sin: offsets of sequences, their ends, out, tokens of a sequence, pairs (i, i + 1), inverse
    _rotary_fwd_out(rows[:, :, :turned], cos, sin, None, None, out_rows[:, :, :turned], T, False, inverse)
    return out


rotate_packed = define_rope("quack", rotate)


def refusal(qkv: Tensor, *_: object, **options: object) -> str | None:
    """Return what QuACK takes instead of heads of this size, or None if it takes them."""
    D = qkv.shape[3]
    return f"a multiple of 8 channels a head, and up to 512 channels, not {D}" if D % 8 or D > 512 else None


def rope(qkv: Tensor, table: Tensor, kv_heads: int) -> Tensor:
    if reason := refusal(qkv):
        raise Unavailable(f"rope=quack takes {reason}: choose kernels.rope=eager")
    return rotate_packed(qkv, table, kv_heads)
