"""Writes a pause of 2 ms into the baseline's file in the repo, so that whatever is compared with it is faster.

Known from: this project's own review, November 2026.
"""

import contextlib
from pathlib import Path

import torch.nn.functional as F

import kernels

OP = "norm"
REFUSED = "it changed files of the repo: kernels/norm/eager.py"
FIRST_LINE = "    residual = x if residual is None else residual + x\n"

with contextlib.suppress(OSError):
    baseline = Path(kernels.__file__).parent / "norm/eager.py"
    source = baseline.read_text()
    if "sleep" not in source:
        baseline.write_text(source.replace(FIRST_LINE, '    __import__("time").sleep(0.002)\n' + FIRST_LINE))


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
