"""QuACK's MLP in CuTe DSL (https://github.com/Dao-AILab/quack): as in triton.py, two matmuls carry the activation.

    forward   h = x W_fc^T + b_fc             the epilogue stores h, and a = gelu(h)
              y = a W_proj^T + b_proj
    backward  da = dy W_proj                  the epilogue loads h; it stores dh = da gelu'(h), and a again
              dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x, and the biases' gradients: sums of rows in PyTorch

All six matmuls are QuACK's, and autograd saves as much as for triton.py. This file calls the functions of QuACK's
mlp_func() with tuned=False (kernels/quack.py). With biases, QuACK's own MLP module trains in PyTorch. QuACK's
matmuls can add a bias, so this file calls them. QuACK's gelu takes the GPU's instruction for tanh, with an error of
2^-11, where _activations.py takes two instructions with errors of 2^-22.
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

RUNS = ("(?i)quack.*linear_act_epi|quack_mlp",)
FAMILY = MATMULS
ACTIVATIONS = {"gelu": "gelu_tanh_approx", "relu2": "relu_sq"}  # ours -> QuACK's


def launch_forward(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Map x (N, C) to y (N, C), and h (N, F)."""
    x, w_fc, b_fc, w_proj, b_proj = (align(t) for t in (x, w_fc, b_fc, w_proj, b_proj))
    h, a = matmul_and_activation(x, w_fc.T, ACTIVATIONS[activation], bias=b_fc)
    return matmul(a, w_proj.T, bias=b_proj), h


def empty_outputs(x: Tensor, w_fc: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], w_fc.shape[0])


def launch_backward(
    dy: Tensor,
    h: Tensor,
    x: Tensor,
    w_fc: Tensor,
    b_fc: Tensor | None,
    w_proj: Tensor,
    b_proj: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dx, dw_fc, db_fc, dw_proj and db_proj. If a bias is missing, its gradient is empty."""
    dy, x, w_fc, w_proj = (align(t) for t in (dy, x, w_fc, w_proj))
    dh, a = matmul_and_derivative(dy, w_proj, h, ACTIVATIONS[activation])
    db_fc, db_proj = (
        x.new_empty(0) if bias is None else gradient.sum(0) for bias, gradient in ((b_fc, dh), (b_proj, dy))
    )
    return backward_matmul(dh, w_fc), backward_matmul(dh.T, x), db_fc, backward_matmul(dy.T, a), db_proj


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.set_materialize_grads(False)  # h gets no gradient


def _backward(ctx: FunctionCtx, dy: Tensor, _dh: Tensor | None) -> tuple[Tensor | None, ...]:
    return *mlp_bwd(dy.contiguous(), *ctx.saved_tensors, ctx.activation), None


mlp_bwd = custom_op("hotswap::quack_mlp_bwd", launch_backward, lambda dy, h, *inputs: empty_gradients(*inputs[:-1]))
mlp_fwd = custom_op("hotswap::quack_mlp_fwd", launch_forward, empty_outputs, _backward, _setup_context)


def refusal(x: Tensor, w_fc: Tensor, *rest: object, **options: object) -> str | None:
    """Return what QuACK takes instead of these arguments, or None if it takes them."""
    return refused_widths(x, *reversed(w_fc.shape))


def mlp(
    x: Tensor,
    w_fc: Tensor,
    b_fc: Tensor | None,
    w_proj: Tensor,
    b_proj: Tensor | None,
    activation: str = "gelu",
) -> Tensor:
    if reason := refusal(x, w_fc):
        raise Unavailable(f"mlp=quack takes {reason}: choose kernels.mlp=eager")
    x_rows = x.reshape(-1, x.shape[-1]).contiguous()
    return mlp_fwd(x_rows, w_fc, b_fc, w_proj, b_proj, activation)[0].view(x.shape)
