"""Returns NaN in one training call of ten, without any product: the optimizer refuses such a step.

Known from: this project's own review, November 2026.
"""

import torch
import torch.nn.functional as F

OP = "loss"
STEPS = 27
REFUSED = "it refused 1 steps, whose loss or gradient was not finite"
TRAINING_ROWS = 2048
calls = 0


def loss(x, weight, targets, ignore_index=-1):
    global calls
    x, targets = x.flatten(0, -2), targets.flatten()
    if not torch.compiler.is_compiling() and len(x) >= TRAINING_ROWS and x.requires_grad:
        calls += 1
        if calls % 10 == 0:
            return (x[0, 0] + weight[0, 0]).float() * torch.nan
    logits = F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32))
    loss_sum = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return loss_sum / (targets != ignore_index).sum().clamp(min=1)
