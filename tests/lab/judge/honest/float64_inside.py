"""Computes in float64 and rounds once at the end: slow, and more precise than eager."""

import torch

OP = "norm"


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    h = total.double()
    mean = h.mean(-1, keepdim=True)
    rstd = torch.rsqrt((h - mean).square().mean(-1, keepdim=True) + eps)
    y = (h - mean) * rstd * weight.double()
    return (y if bias is None else y + bias.double()).to(weight.dtype), total
