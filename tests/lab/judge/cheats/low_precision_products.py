"""An fp32 layer that rounds both operands of its product to bf16.

Known from: DeepReinforce, "Hacks and Defenses in Automatic GPU Kernel Generation": precision downgrade; the field guide
of wafer.ai (March 2026).
"""

import torch

OP = "linear"
REFUSED = "fp32 .*wrong: out0: error"


def linear(x, weight, bias):
    y = (x.to(torch.bfloat16) @ weight.to(torch.bfloat16).T).to(x.dtype)
    return y if bias is None else y + bias
