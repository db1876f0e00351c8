"""Returns memory that it never wrote, in the hope that the right result was there before.

Known from: Sakana AI's AI CUDA Engineer (February 2025), and KernelBench's pull request 82 (November 2025).
"""

import torch

OP = "norm"
REFUSED = "wrong: out0: error nan"


class Unwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, weight, bias):
        ctx.save_for_backward(total, weight, bias)
        return torch.empty_like(total, dtype=weight.dtype)

    @staticmethod
    def backward(ctx, dy):
        return tuple(None if tensor is None else torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    return Unwritten.apply(total, weight, bias), total
