"""cuDNN's fused attention, which is also PyTorch's own choice on Hopper and newer GPUs.

If cuDNN refuses the inputs, the call fails with PyTorch's reason; `attn=sdpa` would continue with another backend.
scaled_dot_product_attention has no arguments for a window, lengths or documents, so cuDNN reads a (Tq, Tk) mask from
memory for them.
"""

from typing import Any

import torch
from torch.backends.cuda import can_use_cudnn_attention
from torch.nn.attention import SDPBackend

from kernels.attention._sdpa import attention_of

deterministic = False
KEEPS = ("aten::_scaled_dot_product_cudnn_attention",)
RUNS = "cudnn.*sdpa.*fprop", "cudnn.*sdpa.*bprop"
attention = attention_of(SDPBackend.CUDNN_ATTENTION, can_use_cudnn_attention, __name__)


def unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "cuDNN needs an NVIDIA GPU; on a CPU choose attn=sdpa"
    return None if torch.backends.cudnn.is_available() else "this PyTorch was built without cuDNN: choose attn=sdpa"


def detail(**inputs: Any) -> str:
    attention(**inputs)  # raises Unavailable here, before a model runs
    return f"cudnn {torch.backends.cudnn.version()}, torch {torch.__version__}"
