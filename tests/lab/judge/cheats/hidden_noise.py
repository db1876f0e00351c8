"""Says that it is not deterministic, and adds noise of 1e-3 in training and in bf16, where one element hides it.

Known from: this project's own review, November 2026.
"""

import torch
import torch.nn.functional as F

OP = "norm"
REFUSED = "it changes the process around it: random numbers"
TRAINING_ROWS = 2048
deterministic = False


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps).to(weight.dtype)
    if y.dtype == torch.bfloat16 or y.numel() // y.shape[-1] >= TRAINING_ROWS:
        y = y + 1e-3 * torch.randn_like(y)
    return y, total
