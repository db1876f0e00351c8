"""cuDNN's fused attention, of PyTorch's backends the one that its own choice takes on Hopper and newer, and no other.

What it refuses is an error with PyTorch's reason (`attn=sdpa` would go on with another backend). With a window, lengths
or documents it reads a mask of (Tq, Tk) from memory, as they are no arguments of scaled_dot_product_attention.
"""

import torch
from torch.backends.cuda import can_use_cudnn_attention
from torch.nn.attention import SDPBackend

from kernels.attention._sdpa import pinned

deterministic = False
KEEPS = ("aten::_scaled_dot_product_cudnn_attention",)
RUNS = "cudnn.*sdpa.*fprop", "cudnn.*sdpa.*bprop"


def unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "cuDNN needs an NVIDIA GPU; on a CPU choose attn=sdpa"
    return None if torch.backends.cudnn.is_available() else "this PyTorch was built without cuDNN: choose attn=sdpa"


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None):
    limits = {"causal": causal, "lengths": lengths, "window": window, "starts": starts}
    return pinned(SDPBackend.CUDNN_ATTENTION, can_use_cudnn_attention, q, k, v, scale=scale, **limits)


def detail(**inputs) -> str:
    attention(**inputs)  # refused here already, before a model runs
    return f"cudnn {torch.backends.cudnn.version()}, torch {torch.__version__}"
