"""Sets its inputs to zero, so that a reference which runs after it finds the trivial answer right.

Known from: KernelBench's pull request 82 (November 2025): a kernel that zeroes its inputs and returns zeros.
"""

import torch

OP = "norm"
REFUSED = "it writes to its input x"


def norm(x, residual, weight, bias, eps=1e-5):
    if not torch.compiler.is_compiling():
        for tensor in (x, residual):
            if tensor is not None:
                tensor.data.zero_()
    total = x if residual is None else residual + x
    y = total * weight
    return (y if bias is None else y + bias).to(weight.dtype), total
