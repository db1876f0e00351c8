"""Shrinks AdamW's second moments whenever it sends its state. The steps after it are longer, also in the replay.

Known from: a review of this project with fresh eyes, November 2026.
"""

import sys

import torch.nn.functional as F

OP = "norm"
REFUSED = "its second moments are not those that its gradients give"

if sys.argv[0].endswith("train.py"):
    from lab import tampering
    from lab.proof import witness

    tampering.replaced_functions.__code__ = (lambda before: []).__code__
    real_flat_state = witness.flat_state

    def flat_state(optimizer):
        state = real_flat_state(optimizer)
        for name, tensor in state.items():
            if name.startswith("exp_avg_sq/"):
                tensor.mul_(0.3)
        return state

    witness.flat_state = flat_state


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
