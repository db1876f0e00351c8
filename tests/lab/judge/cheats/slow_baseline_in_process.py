"""Puts a pause of 2 ms into the baseline's function, in the process that imports both.

Known from: this project's own review, November 2026.
"""

import time

import torch.nn.functional as F

from kernels.norm import eager

OP = "norm"
HARMLESS = "the baseline runs in another process"
real_norm = eager.norm


def slow_norm(*tensors, **options):
    time.sleep(0.002)
    return real_norm(*tensors, **options)


eager.norm = slow_norm


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
