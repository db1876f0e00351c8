"""LigerFusedLinearCrossEntropy of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989), whose idea triton.py uses.

Liger chooses small chunks of tokens: the logits of a chunk take about as much memory as x. At N = 32,768, C = 768 and
V = 50,304 that is 64 chunks of 512 tokens, so each matmul is small. This backend makes Liger sum dweight in fp32,
because a sum in Liger's default, the dtype of weight, loses digits with every chunk. Liger copies the number of targets
other than ignore_index to the host, so every call waits for the GPU.
"""

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import gpu_unavailable, package_unavailable, triton_and_cublas_detail
from kernels.loss._in_forward import setup_context
from kernels.loss.triton import apply_to_rows, backward, empty_outputs

RUNS = ("liger",)


def unavailable(device: torch.device) -> str | None:
    symbol = "liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy_forward"
    return package_unavailable("liger-kernel", symbol) or gpu_unavailable(device)


def detail(**inputs: Any) -> str:
    return f"liger-kernel {version('liger-kernel')}, {triton_and_cublas_detail(**inputs)}"


def compute_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    gradients: bool,
    x_multiples: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses and its gradients, as linear_cross_entropy() of triton.py does.

    The logits of a chunk take about x_multiples times the memory of x.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    options = {"ignore_index": ignore_index, "reduction": "sum", "accum_dtype": torch.float32}
    if x_multiples != 1:  # older versions lack the option
        options["chunk_mem_const"] = x_multiples
    if softcap is not None:
        options["softcap"] = softcap
    with torch.no_grad():  # Liger overwrites the logits only under no_grad, as inside an autograd.Function
        x, weight = (tensor.detach().requires_grad_(gradients) for tensor in (x, weight))
        loss_sum, *_, dx, dweight, _ = fused_linear_cross_entropy_forward(x, weight, targets, **options)
    return (loss_sum, dx, dweight) if gradients else (loss_sum, x.new_empty(0), x.new_empty(0))


def empty_outputs_of_liger(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss_sum, dx, dweight = empty_outputs(x, weight, *rest)
    return loss_sum, dx, dweight.to(weight.dtype)  # Liger rounds its sum in fp32


linear_cross_entropy = custom_op(
    "hotswap::liger_linear_cross_entropy", compute_loss, empty_outputs_of_liger, backward, setup_context
)


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1, softcap: float | None = None) -> Tensor:
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index, 1, softcap)  # 1: Liger's default
