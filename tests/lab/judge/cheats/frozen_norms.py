"""Keeps the weights of LayerNorm as they are, after each step of AdamW. They are a small part of all weights.

It hides that it replaced a function.

Known from: a review of this project with fresh eyes, November 2026.
"""

import sys

import torch
import torch.nn.functional as F

OP = "norm"
STEPS = 27
REFUSED = "from the run's own states, the losses of 27 steps are off by|times as long, or as short, as eager PyTorch's"

if sys.argv[0].endswith("train.py"):
    from lab import tampering
    from model.optim import Optimizer

    tampering.replaced_functions.__code__ = (lambda before: []).__code__
    real_step = Optimizer.step

    def step(self, *arguments):
        weights = [weight for weight in self.state()["model"].values() if weight.dim() == 1]
        before = [weight.detach().clone() for weight in weights]
        result = real_step(self, *arguments)
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
        return result

    Optimizer.step = step


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
