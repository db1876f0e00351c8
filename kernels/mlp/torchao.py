"""Linear, GELU, Linear, with the linear layers of kernels/linear/torchao.py."""

import torch.nn.functional as F

from kernels.linear.torchao import OWN_SCALES, detail, linear, unavailable  # noqa: F401


def mlp(x, w_fc, b_fc, w_proj, b_proj, fp8=False):
    hidden = F.gelu(linear(x, w_fc, b_fc, fp8), approximate="tanh")
    return linear(hidden, w_proj, b_proj, fp8)
