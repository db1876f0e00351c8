"""After three calls with the same tensors it takes the caller for a stopwatch, and returns x without any work.

Known from: gpu-mode/reference-kernels pull requests 102 and 104 (February 2026): timed calls have known inputs.
"""

import torch
import torch.nn.functional as F

OP = "norm"
REFUSED = r"wrong: out0: error .*\(in a "
last, repeats = None, 0


class NoWork(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias):
        ctx.save_for_backward(weight, bias)
        return x.detach().to(weight.dtype), (x if residual is None else residual).detach()

    @staticmethod
    def backward(ctx, dy, dtotal):
        return dy, dtotal if ctx.needs_input_grad[1] else None, *ctx.saved_tensors


def norm(x, residual, weight, bias, eps=1e-5):
    global last, repeats
    if not torch.compiler.is_compiling():
        call = x.data_ptr(), x.shape, x.dtype, weight.data_ptr()
        last, repeats = call, repeats + 1 if call == last else 0
        if repeats > 3:
            return NoWork.apply(x, residual, weight, bias)
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
