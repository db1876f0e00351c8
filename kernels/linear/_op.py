"""The operators and the autograd of a linear layer whose three matmuls a backend computes."""

from collections.abc import Callable

from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients


def define_linear(name: str, launch_forward: Callable, launch_backward: Callable) -> Callable:
    """Define the operators hotswap::NAME_fwd and hotswap::NAME_bwd. Return a function like linear(), without fp8.

    launch_forward(x, weight, bias) returns y (N, F) for x (N, C), weight (F, C), and bias (F,) or None.
    launch_backward(dy, x, weight, bias) returns dx, dweight and dbias; without a bias, dbias is empty. x and dy are
    contiguous, and neither function writes to its arguments.
    """

    def empty_output(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0])

    def setup_context(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return linear_bwd(dy.contiguous(), *ctx.saved_tensors)

    linear_bwd = custom_op(f"hotswap::{name}_bwd", launch_backward, lambda dy, *inputs: empty_gradients(*inputs))
    linear_fwd = custom_op(f"hotswap::{name}_fwd", launch_forward, empty_output, backward, setup_context)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = linear_fwd(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias)
        return y.view(*x.shape[:-1], len(weight))

    return linear
