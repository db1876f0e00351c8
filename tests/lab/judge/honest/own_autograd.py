"""A layer with a handwritten backward: the three products and the sum, in an autograd.Function."""

import torch
import torch.nn.functional as F

OP = "linear"


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        return dy @ weight, rows.T @ x.flatten(0, -2), rows.sum(0) if ctx.needs_input_grad[2] else None


def linear(x, weight, bias):
    return Linear.apply(x, weight, bias)
