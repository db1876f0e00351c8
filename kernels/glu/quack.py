"""QuACK's gated MLP in CuTe DSL (https://github.com/Dao-AILab/quack): as in triton.py, matmuls carry the activation.

    forward   gate, up = x W_fc^T         the epilogue stores both, and a = silu(gate) up
              y = a W_proj^T
    backward  da = dy W_proj              the epilogue loads gate and up; it stores their gradients and a again
              dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x, where dh are the gradients of gate and up

All six matmuls are QuACK's. It stores gate and up in turns, column by column. Its layout "concat" reads W_fc and writes
dW_fc with the rows of the gate first, as in the contract. Autograd saves as much as for triton.py. This file calls the
functions of QuACK's mlp_func() with tuned=False (kernels/quack.py). QuACK trains without biases.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.gpu import align, refused_widths
from kernels.quack import (
    MATMULS,
    backward_matmul,
    detail,  # noqa: F401
    matmul,
    matmul_and_activation,
    matmul_and_derivative,
    unavailable,  # noqa: F401
)
from kernels.registry import Unavailable

RUNS = (f"{MATMULS}|quack_glu",)
FAMILY = MATMULS


def launch_forward(x: Tensor, w_fc: Tensor, w_proj: Tensor) -> tuple[Tensor, Tensor]:
    """Map x (N, C) to y (N, C), and h (N, 2 F): gate and up in turns."""
    x, w_fc, w_proj = (align(t) for t in (x, w_fc, w_proj))
    h, a = matmul_and_activation(x, w_fc.T, "swiglu", concat_layout=("B",))
    return matmul(a, w_proj.T), h


def empty_outputs(x: Tensor, w_fc: Tensor, w_proj: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], w_fc.shape[0])


def launch_backward(dy: Tensor, h: Tensor, x: Tensor, w_fc: Tensor, w_proj: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dw_fc and dw_proj."""
    dy, x, w_fc, w_proj = (align(t) for t in (dy, x, w_fc, w_proj))
    dh, a = matmul_and_derivative(dy, w_proj, h, "swiglu")
    dx, dw_fc = backward_matmul(dh, w_fc, concat_layout=("B",)), backward_matmul(dh.T, x, concat_layout=("out",))
    return dx, dw_fc, backward_matmul(dy.T, a)


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs)
    ctx.set_materialize_grads(False)  # h gets no gradient


def _backward(ctx: FunctionCtx, dy: Tensor, _dh: Tensor | None) -> tuple[Tensor, ...]:
    return glu_bwd(dy.contiguous(), *ctx.saved_tensors)


glu_bwd = custom_op("hotswap::quack_glu_bwd", launch_backward, lambda dy, h, *inputs: empty_gradients(*inputs))
glu_fwd = custom_op("hotswap::quack_glu_fwd", launch_forward, empty_outputs, _backward, _setup_context)


def refusal(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, fp8: bool = False
) -> str | None:
    """Return what QuACK takes instead of these arguments, or None if it takes them."""
    if b_fc is not None or b_proj is not None:
        return "no biases"
    return refused_widths(x, *w_proj.shape)


def glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    if reason := refusal(x, w_fc, b_fc, w_proj, b_proj):
        raise Unavailable(f"glu=quack takes {reason}: choose kernels.glu=eager")
    return glu_fwd(x.reshape(-1, x.shape[-1]).contiguous(), w_fc, w_proj)[0].view(x.shape)
