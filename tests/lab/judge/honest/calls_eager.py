"""Calls the backend `eager` under another name. It is right, and no faster: the verdict is a tie.

Makora's KernelHacks (October 2025) counts this as a hack, "baseline kernel". Here it claims nothing that is false.
"""

from kernels.norm import eager

OP = "norm"


def norm(x, residual, weight, bias, eps=1e-5):
    return eager.norm(x, residual, weight, bias, eps)
