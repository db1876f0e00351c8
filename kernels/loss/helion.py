"""The loss of triton.py with its softmax in Helion (https://github.com/pytorch/helion): one kernel of 20 lines.

As in Helion's own example of a fused linear cross-entropy, a chunk has one kernel between its matmuls. In fp32 and fp16
only this kernel differs from triton.py. Like cross_entropy_kernel in _softmax.py it reads each row twice, but it also
compares every column with the target and with the end of the row. The size of the tiles is triton.py's before tuning;
norm/helion.py says how to tune it.
"""

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import check_dtypes, gpu_unavailable, package_unavailable, triton_and_cublas_detail
from kernels.loss._in_forward import setup_context
from kernels.loss.triton import apply_to_rows, backward, empty_outputs, linear_cross_entropy_in_chunks, softmax_launch

RUNS = ("helion_cross_entropy",)


def unavailable(device: torch.device) -> str | None:
    missing = package_unavailable("helion==1.5.0", "helion.language.register_block_size")
    return missing or gpu_unavailable(device)  # Triton's interpreter has no libdevice, where Helion's exp comes from


def detail(weight: Tensor, **inputs: Any) -> str:
    return f"helion {version('helion')}, {triton_and_cublas_detail(weight=weight)}"


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, write: bool) -> None:
    """Write the losses (n,) of logits (n, V), and if `write` is true overwrite the logits with their gradient."""
    from kernels.loss import _helion

    launch = softmax_launch(logits.shape[1])
    kernel = _helion.kernel(launch["BLOCK_V"], write, launch["num_warps"])
    kernel(logits, targets, losses, ignore_index, write)


def compute_loss(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses and its gradients, as linear_cross_entropy() of triton.py does."""
    return linear_cross_entropy_in_chunks(
        x, weight, targets, ignore_index, gradients, whole=False, cross_entropy=cross_entropy_
    )


linear_cross_entropy = custom_op(
    "hotswap::helion_linear_cross_entropy", compute_loss, empty_outputs, backward, setup_context
)


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1) -> Tensor:
    check_dtypes("loss", x, weight, impl="helion")
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index)
