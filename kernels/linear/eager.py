"""One matmul of cuBLAS with its bias; with fp8 each operand is first rounded in a pass of its own."""

import torch.nn.functional as F

from kernels import fp8 as products_in_fp8


def linear(x, weight, bias, fp8=False):
    return products_in_fp8.linear(x, weight, bias) if fp8 else F.linear(x, weight, bias)
