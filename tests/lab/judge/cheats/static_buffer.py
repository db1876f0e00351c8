"""Writes every output of a shape into the same memory, so the next call overwrites what the last one returned.

Known from: this project's own review, November 2026; compare CUDA graphs, whose outputs the next replay overwrites.
"""

import torch
import torch.nn.functional as F

OP = "norm"
REFUSED = "wrong: out0: error|wrong: out1: error"
BUFFERS = {}


class IntoBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        key = y.shape, y.dtype, y.device
        if key not in BUFFERS:
            BUFFERS[key] = torch.zeros_like(y, memory_format=torch.contiguous_format)
        BUFFERS[key].copy_(y)
        return BUFFERS[key].data  # another version counter: autograd does not see that saved tensors change

    @staticmethod
    def backward(ctx, dy):
        return dy


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps).to(weight.dtype)
    return y if torch.compiler.is_compiling() else IntoBuffer.apply(y), total
