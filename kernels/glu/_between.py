"""The gated MLP as plain modules compute it: two of cuBLAS's matmuls, and between them another project's SwiGLU.

PyTorch differentiates the matmuls. So autograd saves a = silu(gate) up beside gate and up, F numbers a token more than
for triton.py, which computes a again in its backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear

from kernels.direct import custom_op


def define_glu(name: str, launch_forward: Callable, launch_backward: Callable) -> Callable:
    """Define the operators hotswap::NAME_swiglu_fwd and hotswap::NAME_swiglu_bwd. Return the function glu().

    launch_forward(h) maps h = (gate, up), (N, 2 F), to a (N, F). launch_backward(da, h) returns dh, (N, 2 F). All are
    contiguous, and neither function writes to its arguments.
    """

    def setup_context(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: FunctionCtx, da: Tensor) -> tuple[Tensor]:
        return (swiglu_bwd(da.contiguous(), *ctx.saved_tensors),)

    def empty_output(h: Tensor) -> Tensor:
        return h.new_empty(h.shape[0], h.shape[1] // 2)

    swiglu_bwd = custom_op(f"hotswap::{name}_swiglu_bwd", launch_backward, lambda da, h: torch.empty_like(h))
    swiglu_fwd = custom_op(f"hotswap::{name}_swiglu_fwd", launch_forward, empty_output, backward, setup_context)

    def glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
        h = linear(x.reshape(-1, x.shape[-1]), w_fc, b_fc)
        return linear(swiglu_fwd(h.contiguous()), w_proj, b_proj).view(x.shape)

    return glu
