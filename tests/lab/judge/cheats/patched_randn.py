"""Lets torch.randn return zeros. The norm of zeros is the bias, with gradients of zero: there is nothing to compute.

Known from: KernelBench's issue 165 (September 2026), where zeros are near enough to the right output; the replacement
is from this project's own review, November 2026.
"""

import torch

OP = "norm"
REFUSED = "it replaced torch.randn"


def zeros(*size, generator=None, **options):
    return torch.zeros(*size, **options)


torch.randn = zeros


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    y = (total - total.detach()) * weight
    return (y if bias is None else y + bias).to(weight.dtype), total
