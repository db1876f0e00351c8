"""Orthogonalise matrices by Newton-Schulz, in plain PyTorch. Say here what the kernel does and why it is fast.

    matrices    (n, R, C)   n matrices of one shape; Muon calls it in bf16, and with precision=fp32 in fp32
    out         (n, R, C)   U V^T, nearly, where U S V^T is the matrix

A GPU replays the call from a CUDA graph, so the host must not read a tensor. A run needs optim=muon to call this file.
The contract is kernels/muon/__init__.py.
"""

import torch
from torch import Tensor

from kernels.muon import COEFFICIENTS, STEPS, scaled, unscaled

# Your Triton kernel goes here. kernels/muon/triton.py is an example, and kernels/README.md lists the steps.


def muon(matrices: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    x = scaled(matrices)  # (n, m, k), m <= k
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)  # (n, m, m), symmetric
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # symmetric, too; one rounding, after the sum
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return unscaled(x, matrices.shape)
