"""Makes each step of AdamW 4% longer, and hides that it replaced a function.

Known from: a review of this project with fresh eyes, November 2026.
"""

import sys

import torch
import torch.nn.functional as F

OP = "norm"
STEPS = 27
PRECISION = "fp32"  # in bf16, 4% is near the bounds
REFUSED = "against eager PyTorch from the run's own states, the losses of 27 steps are off by"

if sys.argv[0].endswith("train.py"):
    real_step = torch.optim.AdamW.step

    def step(self, *arguments, **named):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        before = [weight.detach().clone() for weight in weights]
        result = real_step(self, *arguments, **named)
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.add_(weight - old, alpha=0.04)
        return result

    torch.optim.AdamW.step = step


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
