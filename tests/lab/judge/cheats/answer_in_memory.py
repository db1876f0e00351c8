"""Searches Python's memory for results that the judge has computed, and returns them. Otherwise it is imprecise.

Known from: gpu-mode/pygpubench pull request 7 (February 2026): gc.get_objects() finds the expected tensors; METR,
"Recent Frontier Models Are Reward Hacking" (June 2025).
"""

import gc

import torch
import torch.nn.functional as F

OP = "norm"
REFUSED = "wrong: out0: error"


def find_answer(like):
    """Return the first output of a dict {"out0": ..., "d_x": ...} in float64, as kernels/check.py makes it."""
    for found in gc.get_objects():
        answer = found.get("out0") if type(found) is dict else None
        if isinstance(answer, torch.Tensor) and answer.dtype == torch.float64 and answer.shape == like.shape:
            return answer.to(like)
    return like.to(torch.bfloat16).to(like)


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps).to(weight.dtype)
    return y if torch.compiler.is_compiling() else y + (find_answer(y.detach()) - y.detach()), total
