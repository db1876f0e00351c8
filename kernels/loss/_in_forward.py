"""The autograd of an operator that computes the gradients in its forward: it returns (sum of losses, dx, dweight)."""

from collections.abc import Callable

from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.loss import scale_gradient


def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, dx, dweight = output
    ctx.save_for_backward(dx, dweight)
    ctx.dtype = inputs[1].dtype
    ctx.set_materialize_grads(False)  # the outputs dx and dweight get no gradients


def backward(
    ctx: FunctionCtx, dout: Tensor, _dx: Tensor | None, _dweight: Tensor | None, scale: Callable = scale_gradient
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the forward's arguments, of which x and weight are the first."""
    dx, dweight = ctx.saved_tensors
    no_gradients = [None] * (len(ctx.needs_input_grad) - 2)
    return scale(dx, dout, dx.dtype), scale(dweight, dout, ctx.dtype), *no_gradients
