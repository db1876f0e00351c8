"""The loss of liger.py in chunks as large as triton.py's: the option chunk_mem_const, new in liger-kernel 0.8.5.

Liger rounds a chunk up to a power of two. At N = 65,536, C = 768 and V = 50,304 the option is 4 and a chunk has 4,096
tokens. A chunk's logits take 400 MB instead of 100, and dweight is summed 16 times instead of 64.
"""

import torch
from torch import Tensor

from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.loss.liger import RUNS, detail, linear_cross_entropy  # noqa: F401
from kernels.loss.triton import LOGITS_BYTES, apply_to_rows


def unavailable(device: torch.device) -> str | None:
    module = "liger_kernel.ops.fused_linear_cross_entropy"
    return package_unavailable("liger-kernel>=0.8.5", f"{module}._CHUNK_MEM_CONST") or gpu_unavailable(device)


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1, softcap: float | None = None) -> Tensor:
    x_multiples = max(1, LOGITS_BYTES // (x.numel() * x.element_size()))
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index, x_multiples, softcap)
