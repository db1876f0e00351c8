"""PyTorch's memory-efficient attention, in tiles and on any GPU (xFormers; Rabe and Staats 2021, arXiv:2112.05682).

It is the fused backend for fp32 and for masks, and no other is taken: what it refuses, as heads that share keys, is an
error with PyTorch's reason. A window, lengths or documents reach it as a mask of (Tq, Tk) in memory.
"""

import torch
from torch.backends.cuda import can_use_efficient_attention
from torch.nn.attention import SDPBackend

from kernels.attention._sdpa import pinned

deterministic = False  # where the keys are split among programs, dq is summed by atomics
KEEPS = ("aten::_scaled_dot_product_efficient_attention",)
RUNS = "fmha_cutlassF", "fmha_cutlassB"


def unavailable(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "it needs an NVIDIA GPU; on a CPU choose attn=sdpa"


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None):
    limits = {"causal": causal, "lengths": lengths, "window": window, "starts": starts}
    return pinned(SDPBackend.EFFICIENT_ATTENTION, can_use_efficient_attention, q, k, v, scale=scale, **limits)


def detail(**inputs) -> str:
    attention(**inputs)  # refused here already, before a model runs
    return f"torch {torch.__version__}"
