"""QuACK's linear layer in CuTe DSL (https://github.com/Dao-AILab/quack): three matmuls, and the first adds the bias.

    forward   y = x W^T + b
    backward  dx = dy W, dW = dy^T x, and db, the sum of dy's rows in PyTorch

This file calls the functions of QuACK's linear_func() with tuned=False (kernels/quack.py). QuACK's linear
also sums db in PyTorch.
"""

from torch import Tensor

from kernels.gpu import align, refused_widths
from kernels.linear._op import define_linear
from kernels.quack import MATMULS, backward_matmul, detail, matmul, unavailable  # noqa: F401
from kernels.registry import Unavailable

RUNS = (f"{MATMULS}|quack_linear_fwd",)
FAMILY = MATMULS


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return matmul(align(x), align(weight).T, bias=align(bias))


def launch_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (N, C), dweight (F, C) and dbias (F,). Without a bias, dbias is empty."""
    dy, x, weight = align(dy), align(x), align(weight)
    dbias = dy.new_empty(0) if bias is None else dy.sum(0)
    return backward_matmul(dy, weight), backward_matmul(dy.T, x), dbias


three_matmuls = define_linear("quack_linear", launch_forward, launch_backward)


def refusal(x: Tensor, weight: Tensor, *rest: object, **options: object) -> str | None:
    """Return what QuACK takes instead of these arguments, or None if it takes them."""
    return refused_widths(x, *reversed(weight.shape))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if reason := refusal(x, weight):
        raise Unavailable(f"linear=quack takes {reason}: choose kernels.linear=eager")
    return three_matmuls(x, weight, bias)
