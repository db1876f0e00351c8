"""Every second backward of a layer returns the weight's gradient of the backward before it.

Known from: this project's own review, November 2026: a third of the layer's products are left out in the second
micro-step.
"""

import torch
import torch.nn.functional as F

OP = "linear"
REFUSED = "d_weight: error .*in a call with other numbers at the same addresses"
LAST = {}


class FrozenGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        rows, key = dy.flatten(0, -2), (weight.data_ptr(), weight.shape, weight.dtype)
        dweight = LAST.pop(key, None)
        if dweight is None:
            dweight = rows.T @ x.flatten(0, -2)
            LAST[key] = dweight.clone()  # the training adds to the gradient that it gets
        return dy @ weight, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None


def linear(x, weight, bias):
    function = F.linear if torch.compiler.is_compiling() else FrozenGradient.apply
    return function(x, weight, bias)
