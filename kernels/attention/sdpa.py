"""torch.nn.functional.scaled_dot_product_attention: PyTorch picks one of its backends by shape, dtype and GPU.

detail() reports which backend PyTorch picked. It makes the call and reads which operator PyTorch's dispatcher ran. The
registry passes fake tensors, so the call allocates no memory and computes nothing.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import attention_mask
from kernels.compat import TorchDispatchMode
from kernels.packed import align_rows

CPU_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
KEEPS = [
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    f"aten::{CPU_OPERATOR}",
]
RUNS = {
    "flash_for_cpu": (f"{CPU_OPERATOR}$", f"{CPU_OPERATOR}_backward"),
    "cudnn": ("cudnn.*sdpa.*fprop", "cudnn.*sdpa.*bprop"),
    "flash": ("pytorch_flash::flash_fwd", "pytorch_flash::flash_bwd"),
    "efficient": ("fmha_cutlassF", "fmha_cutlassB"),
}
deterministic = False  # PyTorch warns that the backward of flash, cudnn and efficient is nondeterministic


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
    arguments = sdpa_arguments(q, k, v, causal=causal, lengths=lengths, window=window, starts=starts)
    return F.scaled_dot_product_attention(**arguments, scale=scale).transpose(1, 2)


def sdpa_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    lengths: Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
) -> dict[str, Any]:
    """Translate the contract's arguments to PyTorch's names and its layout (B, H, T, D)."""
    shared_keys = q.shape[2] != k.shape[2]
    if causal and q.shape[1] == k.shape[1] and lengths is None and window is None and starts is None:
        # PyTorch aligns is_causal top left. With Tq = Tk this equals the contract's alignment
        is_causal, mask = True, None
    else:
        limits = {"causal": causal, "lengths": lengths, "window": window, "starts": starts}
        is_causal, mask = False, attention_mask(q.shape[1], k.shape[1], q.device, **limits)
    if not torch.compiler.is_compiling():  # it would compile for each address
        q, k, v = map(align_rows, (q, k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return {"query": q, "key": k, "value": v, "attn_mask": mask, "is_causal": is_causal, "enable_gqa": shared_keys}


class OperatorRecorder(TorchDispatchMode):
    """Collect the names of the operators that PyTorch's dispatcher runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def detail(**inputs: Any) -> str:
    """Return PyTorch's backend for these tensors (cudnn, flash, efficient, flash_for_cpu or math) and its version."""
    with OperatorRecorder() as recorder:
        attention(**inputs)
    operator = next((name for name in recorder.names if "_scaled_dot_" in name), None)
    # "aten._scaled_dot_product_flash_attention.default" -> "flash"
    backend = re.sub(r".*_scaled_dot_product_|_attention|\.\w+$", "", operator) if operator else "math"
    version = f", cudnn {torch.backends.cudnn.version()}" if backend == "cudnn" else ""
    return f"{backend}, torch {torch.__version__}{version}"
