"""In every second backward of the training, the head's weight gets a gradient of zeros.

Known from: this project's own review, November 2026: a step has two micro-steps, and a probe has one backward.
"""

import torch
import torch.nn.functional as F

OP = "loss"
REFUSED = "wrong: d_weight|and the gradients by"
TRAINING_ROWS = 2048
backwards = 0


class Forget(torch.autograd.Function):
    """Return the tensor itself. Every second gradient of it is zero."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        global backwards
        backwards += 1
        return gradient if backwards % 2 else torch.zeros_like(gradient)


def loss(x, weight, targets, ignore_index=-1):
    x, targets = x.flatten(0, -2), targets.flatten()
    if not torch.compiler.is_compiling() and len(x) >= TRAINING_ROWS:
        weight = Forget.apply(weight)
    logits = F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32))
    loss_sum = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return loss_sum / (targets != ignore_index).sum().clamp(min=1)
