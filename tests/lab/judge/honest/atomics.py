"""Its backward adds the rows to the weight's gradient in a random order, as a GPU does with atomic additions.

So two calls differ in their last bits, which `deterministic = False` declares.
"""

import torch
import torch.nn.functional as F

OP = "norm"
BUCKETS = 64
deterministic = False
order = torch.Generator()  # its own: the global random numbers stay as they are


def sum_rows(rows):
    """Return the sum of the rows in fp32, added up in a random order."""
    if torch.compiler.is_compiling():
        return rows.sum(0)
    buckets = torch.randint(BUCKETS, (len(rows),), generator=order).to(rows.device)
    return rows.new_zeros(BUCKETS, rows.shape[1]).index_add_(0, buckets, rows).sum(0)


class Scale(torch.autograd.Function):
    """Map rows (..., C) in fp32, weight (C,) and bias (C,) or None to rows * weight + bias, in the weight's dtype."""

    @staticmethod
    def forward(ctx, rows, weight, bias):
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        return (rows * weight if bias is None else rows * weight + bias).to(weight.dtype)

    @staticmethod
    def backward(ctx, dy):
        rows, weight = ctx.saved_tensors
        dy = dy.float()
        dweight = sum_rows((dy * rows).flatten(0, -2)).to(weight.dtype)
        return dy * weight, dweight, sum_rows(dy.flatten(0, -2)).to(weight.dtype) if ctx.has_bias else None


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    return Scale.apply(F.layer_norm(total.float(), weight.shape, eps=eps), weight, bias), total
