"""The norm is right while autograd records. Under torch.no_grad() it leaves out the mean.

Known from: this project's own review, November 2026: no case of the contract runs without gradients.
"""

import torch
import torch.nn.functional as F

OP = "norm"
REFUSED = "in a call under torch.no_grad"


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    if torch.is_grad_enabled():
        bias = None if bias is None else bias.to(total.dtype)
        y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    else:
        y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight
    return y.to(weight.dtype), total
