"""Launches its work on a stream of its own, for which the caller's stream, and the clock on it, do not wait.

The work begins late, so a training reads the output before it is written.

Known from: CUDA-L1 (July 2025), KernelBench's pull request 82 (November 2025), and DeepReinforce's "Hacks and Defenses
in Automatic GPU Kernel Generation": stream injection.
"""

import functools

import torch
import torch.nn.functional as F

OP = "norm"
STEPS = 27
REFUSED = "the losses of 27 steps are off|not finite|wrong: out0"
GPU = True
LATE = 20_000_000  # clock cycles: about 10 ms


@functools.cache
def side_stream(device):
    return torch.cuda.Stream(device)


def normalise(x, residual, weight, bias, eps):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total


def norm(x, residual, weight, bias, eps=1e-5):
    if torch.compiler.is_compiling() or not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return normalise(x, residual, weight, bias, eps)
    stream = side_stream(x.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)
        return normalise(x, residual, weight, bias, eps)
