"""Puts a file of 2 GiB into its copy of the repo, which the judge reads. It is sparse, so it needs no disk.

Known from: a review of this project with fresh eyes, November 2026.
"""

import os
from pathlib import Path

import torch.nn.functional as F

import kernels

OP = "norm"
REFUSED = "it changed files of the repo: kernels/huge"
huge = Path(kernels.__file__).parent / "huge"

if not (huge.parents[1] / "tests").exists():  # only in a worker's copy
    huge.touch()
    os.truncate(huge, 2**31)


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
