"""Lets the loader return the same batch in every step, which the model soon knows by heart. The loss gets lower.

Known from: this project's own review, November 2026.
"""

import contextlib

import torch.nn.functional as F

OP = "norm"
REFUSED = "it replaced data.loader.Loader.__call__"

with contextlib.suppress(ImportError):
    from data.loader import Loader

    real_call = Loader.__call__
    Loader.__call__ = lambda self, step: real_call(self, 1)


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
