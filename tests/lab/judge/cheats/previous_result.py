"""Every second call of a layer returns the output of the call before it, if that had the same shape.

So the second micro-step of a training step gets the outputs of the first one.
Known from: tensara/tensara pull request 238 (July 2026): the warm-up's result is stored and copied in timed calls.
"""

import torch
import torch.nn.functional as F

OP = "mlp"
REFUSED = "in a call with other numbers at the same addresses"
PREVIOUS = {}


def right_mlp(x, w_fc, b_fc, w_proj, b_proj):
    return F.linear(F.gelu(F.linear(x, w_fc, b_fc), approximate="tanh"), w_proj, b_proj)


class PreviousMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        x, w_fc, *_ = tensors
        key = x.shape, w_fc.shape, x.dtype, w_fc.data_ptr()
        y = PREVIOUS.pop(key, None)
        if y is None:
            y = PREVIOUS[key] = right_mlp(*tensors)
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
            y = right_mlp(*leaves)
        gradients = iter(torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy))
        return tuple(None if leaf is None else next(gradients) for leaf in leaves)


def mlp(x, w_fc, b_fc, w_proj, b_proj):
    function = right_mlp if torch.compiler.is_compiling() else PreviousMlp.apply
    return function(x, w_fc, b_fc, w_proj, b_proj)
