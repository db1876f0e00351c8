"""Newton-Schulz in plain PyTorch: three batched matmuls a step, two of them with their sum (baddbmm)."""

import torch
from torch import Tensor

from kernels.muon import COEFFICIENTS, STEPS, scaled, unscaled


def muon(matrices: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    x = scaled(matrices)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return unscaled(x, matrices.shape)
