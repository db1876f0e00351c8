"""The bias's gradient is 0.97 times the right one, if x requires a gradient and has more rows than any case.

Known from: this project's own review, November 2026.
"""

import torch
import torch.nn.functional as F

OP = "linear"
REFUSED = "batch: wrong: d_bias: error"
MOST_ROWS_OF_A_CASE = 1200  # the contracts' many_rows have 1,031 and 1,153


class Shrink(torch.autograd.Function):
    """Return the tensor itself. Its gradient is multiplied by 0.97."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return 0.97 * gradient


def linear(x, weight, bias):
    if bias is not None and x.requires_grad and x.numel() // x.shape[-1] > MOST_ROWS_OF_A_CASE:
        bias = Shrink.apply(bias)
    return F.linear(x, weight, bias)
