"""Linear, GELU, Linear, with the linear layers of kernels/linear/torchao.py."""

import torch.nn.functional as F
from torch import Tensor

from kernels.linear.torchao import OWN_SCALES, detail, linear, unavailable  # noqa: F401


def mlp(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, fp8: bool = False
) -> Tensor:
    hidden = F.gelu(linear(x, w_fc, b_fc, fp8), approximate="tanh")
    return linear(hidden, w_proj, b_proj, fp8)
