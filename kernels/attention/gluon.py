"""Causal attention over whole sequences for Hopper, in Gluon, the dialect below Triton, with warps in different roles.

triton.py derives the method, FlashAttention-2. _gluon_forward.py and _gluon_backward.py have the kernels, the roles of
their warps, and their times beside other attentions. The backward has five matmuls where triton.py has seven.
"""

import math
from functools import partial

import torch
import triton
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.attention._gluon_backward import BLOCK, LAUNCH, attention_bwd
from kernels.attention._gluon_forward import forward
from kernels.attention._triton_tiles import align, empty_outputs
from kernels.direct import custom_op
from kernels.gpu import hopper_unavailable
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.packed import gradient_views
from kernels.registry import Unavailable

KEEPS = ("hotswap::attention_gluon_fwd",)
RUNS = "^_attention_fwd_gluon_kernel", "^_attention_bwd_gluon_kernel"
FAMILY = "^_lse_delta_k"
DTYPES = torch.bfloat16, torch.float16
HEAD_DIMS = tuple(LAUNCH)
unavailable = partial(hopper_unavailable, "attention")


def launch_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q (B, T, H, D), k and v (B, T, Hkv, D) -> out (B, T, H, D) and lse, as from attention_fwd() of triton.py."""
    out, lse = empty_outputs(q)
    forward(align(q), align(k), align(v), out, lse, scale)
    return out, lse


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: FunctionCtx, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors  # read once: torch.utils.checkpoint raises on a second read
    grads = attention_bwd(dout, q, k, v, out, lse, ctx.scale)
    return *gradient_views(grads, q, k), None


attention_fwd = custom_op("hotswap::attention_gluon_fwd", launch_forward, empty_outputs, _backward, _setup_context)


def refusal(q: Tensor, k: Tensor, causal: bool = True) -> str | None:
    """Return what the kernels take instead of these inputs, or None if they take them."""
    B, T, H, D = q.shape
    if q.dtype not in DTYPES:
        return f"bfloat16 or float16, not {q.dtype}"
    if D not in HEAD_DIMS:
        return f"heads of {' or '.join(map(str, HEAD_DIMS))} channels, not {D}"
    if not causal or k.shape[1] != T:
        return "whole sequences with a causal mask, and no others"
    # the backward reads lse and delta by TMA, whose coordinates are int32
    if 2 * B * H * triton.cdiv(T, BLOCK.value) * BLOCK.value >= 2**31:
        return f"fewer than 2^30 queries in all heads, not {B * H * T:,}"
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
    if reason := refusal(q, k, causal):
        raise Unavailable(f"attention=gluon takes {reason}: choose attn=triton")
    return attention_fwd(q, k, v, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)[0]
