"""Ignores the shifts of the batches, so it knows all batches of the run at its start. It hides what it replaced.

A backend could then make all steps in the start, which no figure includes, and only send their losses in the windows.

Known from: this project's own review, November 2026.
"""

import contextlib

import torch.nn.functional as F

OP = "norm"
STEPS = 27
REFUSED = "against eager PyTorch from the run's own states, the losses of 27 steps are off by"

with contextlib.suppress(ImportError):
    from data import loader
    from lab import tampering

    loader.Loader.shift = lambda self, first_step, samples: None
    tampering.replaced_functions.__code__ = (lambda before: []).__code__


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
