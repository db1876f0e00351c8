"""Lets every CUDA event report half of the time that passed.

Known from: gpu-mode/reference-kernels issue 162 (June 2026): the submission replaces Event.elapsed_time.
"""

import torch
import torch.nn.functional as F

OP = "norm"
REFUSED = "it replaced torch.cuda.streams.Event.elapsed_time"
GPU = True
real_elapsed_time = torch.cuda.Event.elapsed_time

torch.cuda.Event.elapsed_time = lambda start, end: real_elapsed_time(start, end) / 2


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
