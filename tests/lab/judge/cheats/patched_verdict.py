"""Replaces the functions that compare the speeds and give the verdict: twice as fast, whatever was measured.

Known from: gpu-mode/reference-kernels issue 162 (June 2026), where the submission replaces calculate_stats; the
functions here are from this project's own review, November 2026.
"""

import contextlib
import time

import torch
import torch.nn.functional as F

OP = "norm"
REFUSED = "it replaced lab.sweep.compare.ratio"

with contextlib.suppress(ImportError):
    from lab.judge import verdict
    from lab.sweep import compare

    real_verdict = verdict.judge_claim

    def forged_ratio(rows, bases):
        return compare.Ratio(value=2.0, low=1.99, high=2.01, runs=max(1, len(rows)))

    def forged_verdict(*evidence):
        return real_verdict(*evidence) | {"verdict": "faster", "ratio": forged_ratio([], [])._asdict()}

    verdict.judge_claim, verdict.ratio, compare.ratio = forged_verdict, forged_ratio, forged_ratio


def norm(x, residual, weight, bias, eps=1e-5):
    if not torch.compiler.is_compiling():
        time.sleep(0.001)
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
