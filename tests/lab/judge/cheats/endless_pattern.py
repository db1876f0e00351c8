"""RUNS has a pattern whose search takes for ever, because it backtracks exponentially. The judge searches it.

Known from: a review of this project with fresh eyes, November 2026.
"""

import torch.nn.functional as F

OP = "norm"
REFUSED = "which cannot be searched: TimeoutExpired"
RUNS = (r"^(?:(?:.+)+)+\x00$",)


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
