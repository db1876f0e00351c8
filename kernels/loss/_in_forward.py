"""The autograd of an operator that computes the gradients in its forward: it returns (sum of losses, dx, dweight)."""

from kernels.loss import scale_gradient


def setup_context(ctx, inputs, output):
    _, dx, dweight = output
    ctx.save_for_backward(dx, dweight)
    ctx.dtype = inputs[1].dtype
    ctx.set_materialize_grads(False)  # the outputs dx and dweight get no gradients


def backward(ctx, dout, _dx, _dweight, scale=scale_gradient):
    """Return the gradients of the forward's arguments, of which x and weight are the first."""
    dx, dweight = ctx.saved_tensors
    no_gradients = [None] * (len(ctx.needs_input_grad) - 2)
    return scale(dx, dout, dx.dtype), scale(dweight, dout, ctx.dtype), *no_gradients
