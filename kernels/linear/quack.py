"""QuACK's linear layer in CuTe DSL (https://github.com/Dao-AILab/quack): three matmuls, and the first adds the bias.

    forward   y = x W^T + b
    backward  dx = dy W, dW = dy^T x, and db, the sum of dy's rows in PyTorch

This file calls the functions of QuACK's linear_func() with tuned=False (kernels/quack.py). PyTorch also sums db there.
"""

from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.quack import MATMULS, backward_matmul, detail, matmul, operands, refused_widths, unavailable  # noqa: F401
from kernels.registry import Unavailable

RUNS = (f"{MATMULS}|quack_linear_fwd",)
FAMILY = MATMULS


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, weight, bias = operands(x, weight, bias)
    return matmul(x, weight.T, bias=bias)


def launch_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (N, C), dweight (F, C) and dbias (F,). Without a bias, dbias is empty."""
    dy, x, weight = operands(dy, x, weight)
    dbias = dy.new_empty(0) if bias is None else dy.sum(0)
    return backward_matmul(dy, weight), backward_matmul(dy.T, x), dbias


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return linear_bwd(dy.contiguous(), *ctx.saved_tensors)


linear_bwd = custom_op("hotswap::quack_linear_bwd", launch_backward, lambda dy, *inputs: empty_gradients(*inputs))
linear_fwd = custom_op(
    "hotswap::quack_linear_fwd",
    launch_forward,
    lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    _backward,
    _setup_context,
)


def refusal(x: Tensor, weight: Tensor, *rest: object, **options: object) -> str | None:
    """Return what QuACK takes instead of these arguments, or None if it takes them."""
    return refused_widths(x, *reversed(weight.shape))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if reason := refusal(x, weight):
        raise Unavailable(f"linear=quack takes {reason}: choose kernels.linear=eager")
    return linear_fwd(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias).view(*x.shape[:-1], len(weight))
