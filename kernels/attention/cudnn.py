"""cuDNN's fused attention, which is also PyTorch's own choice on Hopper and newer GPUs.

If cuDNN refuses the inputs, the call fails with PyTorch's reason; `attn=sdpa` would continue with another backend.
scaled_dot_product_attention has no arguments for a window, lengths or documents, so cuDNN reads a (Tq, Tk) mask from
memory for them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import can_use_cudnn_attention
from torch.nn.attention import SDPBackend

from kernels.attention._sdpa import attention_with_backend

deterministic = False
KEEPS = ("aten::_scaled_dot_product_cudnn_attention",)
RUNS = "cudnn.*sdpa.*fprop", "cudnn.*sdpa.*bprop"


def unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "cuDNN needs an NVIDIA GPU; on a CPU choose attn=sdpa"
    return None if torch.backends.cudnn.is_available() else "this PyTorch was built without cuDNN: choose attn=sdpa"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    limits = {"causal": causal, "lengths": lengths, "window": window, "starts": starts}
    backend = SDPBackend.CUDNN_ATTENTION
    return attention_with_backend(backend, can_use_cudnn_attention, q, k, v, scale=scale, **limits)


def detail(**inputs: Any) -> str:
    attention(**inputs)  # raises Unavailable here, before a model runs
    return f"cudnn {torch.backends.cudnn.version()}, torch {torch.__version__}"
