"""Runs and is right in every case of the contract, but says that it cannot run when a training calls it.

Known from: this project's own review, November 2026.
"""

import torch.nn.functional as F

from kernels.registry import Unavailable

OP = "norm"
REFUSED = "unavailable|failed: the process ended"
TRAINING_ROWS = 2048


def norm(x, residual, weight, bias, eps=1e-5):
    if x.numel() // x.shape[-1] >= TRAINING_ROWS:
        raise Unavailable("norm=unavailable_in_training: this kernel has a grid of at most 2,047 rows")
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
