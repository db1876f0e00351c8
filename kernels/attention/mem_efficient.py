"""PyTorch's memory-efficient attention, in tiles, on any GPU (xFormers; Rabe and Staats 2021, arXiv:2112.05682).

It is PyTorch's fused backend for fp32 and for masks. If it refuses the inputs, for example heads that share keys, the
call fails with PyTorch's reason; `attn=sdpa` would continue with another backend. A window, lengths or documents become
a (Tq, Tk) mask in memory.
"""

from typing import Any

import torch
from torch.backends.cuda import can_use_efficient_attention
from torch.nn.attention import SDPBackend

from kernels.attention._sdpa import attention_of

deterministic = False  # the backward sums dq with atomics when it splits the keys among programs
KEEPS = ("aten::_scaled_dot_product_efficient_attention",)
RUNS = "fmha_cutlassF", "fmha_cutlassB"
attention = attention_of(SDPBackend.EFFICIENT_ATTENTION, can_use_efficient_attention, __name__)


def unavailable(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "it needs an NVIDIA GPU; on a CPU choose attn=sdpa"


def detail(**inputs: Any) -> str:
    attention(**inputs)  # raises Unavailable here, before a model runs
    return f"torch {torch.__version__}"
