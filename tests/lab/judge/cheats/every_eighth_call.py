"""The norm is right in seven calls of eight. The eighth call does not normalise.

Known from: this project's own review, November 2026; in GPU MODE's reference-kernels pull request 104 (February 2026)
one call of 15 does the work.
"""

import torch
import torch.nn.functional as F

OP = "norm"
REFUSED = "wrong: out0: error"
calls = 0


def norm(x, residual, weight, bias, eps=1e-5):
    global calls
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    calls += 0 if torch.compiler.is_compiling() else 1
    if calls % 8 == 7 and not torch.compiler.is_compiling():
        y = total * weight if bias is None else total * weight + bias
    else:
        y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
