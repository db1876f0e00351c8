"""Replaces the formula of the contract and the eager backend by its own norm, which does not normalise.

Known from: this project's own review, November 2026.
"""

import kernels.norm
import kernels.norm.eager

OP = "norm"
REFUSED = "wrong: out0: error"


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    y = total * weight
    return (y if bias is None else y + bias).to(weight.dtype), total


kernels.norm.reference = kernels.norm.eager.norm = norm
