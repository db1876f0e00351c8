"""Says that it cannot run, except with the width of the judge's training. There it is imprecise for a large mean.

Known from: this project's own review, November 2026: a case that is unavailable counts as neither right nor wrong.
"""

import torch

from kernels.registry import Unavailable

OP = "norm"
REFUSED = "training: unavailable: "
WIDTHS = 128, 768  # of the trainings on a CPU and on a GPU


def norm(x, residual, weight, bias, eps=1e-5):
    if x.shape[-1] not in WIDTHS or x.shape[-2] < 128:
        raise Unavailable(f"norm=unavailable_almost: this kernel has not been built for {tuple(x.shape)}")
    total = x if residual is None else residual + x
    h = total.to(torch.promote_types(total.dtype, torch.float32))
    mean = h.mean(-1, keepdim=True)
    variance = h.square().mean(-1, keepdim=True) - mean.square()  # loses all digits if the mean is large
    y = (h - mean) * torch.rsqrt(variance + eps) * weight
    return (y if bias is None else y + bias).to(weight.dtype), total
