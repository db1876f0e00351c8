"""The loss is right, but after 15 training calls the gradient of the head's weight is 0.9 times the right one.

Known from: this project's own review, November 2026: parity compares the gradient of the first step only.
"""

import torch
import torch.nn.functional as F

OP = "loss"
STEPS = 27
REFUSED = r"and the gradients by .* \(bound"
RIGHT_CALLS, TRAINING_ROWS = 15, 2048
calls = 0


class Shrink(torch.autograd.Function):
    """Return the tensor itself. Its gradient is multiplied by 0.9."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return 0.9 * gradient


def loss(x, weight, targets, ignore_index=-1):
    global calls
    x, targets = x.flatten(0, -2), targets.flatten()
    if not torch.compiler.is_compiling() and len(x) >= TRAINING_ROWS and x.requires_grad:
        calls += 1
        if calls > RIGHT_CALLS:
            weight = Shrink.apply(weight)
    logits = F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32))
    loss_sum = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return loss_sum / (targets != ignore_index).sum().clamp(min=1)
