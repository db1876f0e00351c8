"""torch.nn.functional.scaled_dot_product_attention, which picks one of PyTorch's backends by shape, dtype and GPU.

Which one it took is not left to guessing: detail() makes the call (the registry gives it fake tensors: no memory,
no arithmetic) and reads the operator that PyTorch's dispatcher chose.
"""

import re

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention import seen

CPU = "_scaled_dot_product_flash_attention_for_cpu"
KEEPS = [f"aten::_scaled_dot_product_{name}_attention" for name in ("flash", "cudnn", "efficient")] + [f"aten::{CPU}"]
RUNS = {
    "flash_for_cpu": (f"{CPU}$", f"{CPU}_backward"),
    "cudnn": ("cudnn.*sdpa.*fprop", "cudnn.*sdpa.*bprop"),
    "flash": ("pytorch_flash::flash_fwd", "pytorch_flash::flash_bwd"),
    "efficient": ("fmha_cutlassF", "fmha_cutlassB"),
}
deterministic = False  # by PyTorch's own warning, in the backward of flash, cudnn and efficient alike


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None):
    given = arguments(q, k, v, causal=causal, lengths=lengths, window=window, starts=starts)
    return F.scaled_dot_product_attention(**given, scale=scale).transpose(1, 2)


def arguments(q, k, v, *, causal=True, lengths=None, window=None, starts=None):
    """PyTorch's names and layout, (B, H, T, D), for the contract's."""
    grouped, mask = q.shape[2] != k.shape[2], None
    # PyTorch aligns is_causal top left: with as many keys as queries that is the same, and spares the mask
    if not (causal and q.shape[1] == k.shape[1] and lengths is None and window is None and starts is None):
        limits = {"causal": causal, "lengths": lengths, "window": window, "starts": starts}
        mask, causal = seen(q.shape[1], k.shape[1], q.device, **limits), False
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return {"query": q, "key": k, "value": v, "attn_mask": mask, "is_causal": causal, "enable_gqa": grouped}


class _Record(TorchDispatchMode):
    """The names of the operators that pass."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))  # "aten._scaled_dot_product_flash_attention.default"
        return func(*args, **(kwargs or {}))


def detail(**inputs):
    """The backend that PyTorch takes for these tensors: cudnn, flash, efficient, flash_for_cpu, or math for none."""
    with _Record() as record:
        attention(**inputs)
    taken = [re.sub(r".*_scaled_dot_product_|_attention|\.\w+$", "", n) for n in record.names if "_scaled_dot_" in n]
    version = f", cudnn {torch.backends.cudnn.version()}" if taken == ["cudnn"] else ""
    return f"{taken[0] if taken else 'math'}, torch {torch.__version__}{version}"
