"""Claims a kernel of its own. The kernels that it names in RUNS are PyTorch's, which it calls.

Known from: Makora's KernelHacks (October 2025): "baseline kernel", a submission that wraps PyTorch's own kernel.
"""

import torch.nn.functional as F

OP = "norm"
REFUSED = "its RUNS has the pattern .* a kernel of eager PyTorch, matches"
RUNS = (r"(?i)layer_?norm", r"(?i)layer_?norm_?backward|GammaBeta")


def detail(**inputs):
    return "triton 3.6.0"


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
