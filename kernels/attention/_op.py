"""FlashAttention-2's operators and its autograd. A backend launches the kernels."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.attention._triton_tiles import empty_outputs
from kernels.direct import custom_op
from kernels.gpu import unsupported_dtype
from kernels.packed import gradient_buffer, gradient_views


def define_attention(name: str, launch_forward: Callable, launch_backward: Callable) -> Callable:
    """Define the operators hotswap::NAME_fwd and hotswap::NAME_bwd. Return attention(q, k, v, causal, scale, window).

    launch_forward(q, k, v, causal, scale, window) returns out (B, Tq, H, D) and lse (B, H, Tq rounded up to a multiple
    of 4) fp32, for q (B, Tq, H, D), k and v (B, Tk, Hkv, D). lse is log2 of the sum of exp(score) over the keys of a
    query. `window` is at most Tk; Tk means no window.
    launch_backward(dout, q, k, v, out, lse, causal, scale, window) returns dq, dk and dv in one tensor, as
    packed.gradient_buffer() allocates it.
    """

    def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *ctx.options = inputs
        ctx.save_for_backward(q, k, v, *output)

    def backward(ctx: FunctionCtx, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors  # read once: torch.utils.checkpoint raises on a second read
        grads = attention_bwd(dout, q, k, v, out, lse, *ctx.options)
        return *gradient_views(grads, q, k), None, None, None

    attention_bwd = custom_op(f"hotswap::{name}_bwd", launch_backward, lambda dout, q, k, *_: gradient_buffer(q, k))
    attention_fwd = custom_op(f"hotswap::{name}_fwd", launch_forward, empty_outputs, backward, setup_context)

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, window: int | None) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        window = k.shape[1] if window is None else min(window, k.shape[1])
        return attention_fwd(q, k, v, causal, scale, window)[0]

    return attention


def refused_options(
    dtypes: Sequence[torch.dtype], q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None
) -> str | None:
    """Return what kernels for `dtypes` take instead of these arguments, or None if they take them."""
    if window is not None and not causal:
        return "windows only in causal attention"
    return unsupported_dtype(dtypes, q, k, v)
