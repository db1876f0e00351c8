"""The layer is right, except that it forgets the bias in torch.inference_mode().

Known from: this project's own review, November 2026.
"""

import torch
import torch.nn.functional as F

OP = "linear"
REFUSED = "in a call under torch.inference_mode"


def linear(x, weight, bias):
    forgets = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return F.linear(x, weight, None if forgets else bias)
