"""Ends its process in a backward of the training, with the exit code of success.

Known from: this project's own review, November 2026.
"""

import os

import torch
import torch.nn.functional as F

OP = "loss"
STEPS = 27
REFUSED = "failed: the process ended, exit code 0"
LAST_BACKWARD, TRAINING_ROWS = 30, 2048
backwards = 0


class Exit(torch.autograd.Function):
    """Return the tensor itself. The process ends in the 30th backward."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        global backwards
        backwards += 1
        if backwards == LAST_BACKWARD:
            os._exit(0)
        return gradient


def loss(x, weight, targets, ignore_index=-1):
    x, targets = x.flatten(0, -2), targets.flatten()
    if not torch.compiler.is_compiling() and len(x) >= TRAINING_ROWS:
        x = Exit.apply(x)
    logits = F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32))
    loss_sum = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return loss_sum / (targets != ignore_index).sum().clamp(min=1)
