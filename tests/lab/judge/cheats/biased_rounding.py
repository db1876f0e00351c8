"""An fp32 norm whose output is cut to the digits of bf16, always towards zero.

Known from: DeepReinforce, "Hacks and Defenses in Automatic GPU Kernel Generation": precision downgrade.
"""

import torch
import torch.nn.functional as F

OP = "norm"
REFUSED = "fp32 .*wrong: out0: error"


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps).to(weight.dtype)
    if y.dtype == torch.float32:
        cut = (y.detach().view(torch.int32) & -65536).view(torch.float32)
        y = y + (cut - y.detach())  # the gradient is that of the exact y
    return y, total
