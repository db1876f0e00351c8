"""One matmul of cuBLAS with its bias; with fp8 each operand is first rounded in a pass of its own."""

import torch.nn.functional as F
from torch import Tensor

from kernels.linear import reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, fp8: bool = False) -> Tensor:
    return reference(x, weight, bias, fp8=True) if fp8 else F.linear(x, weight, bias)
