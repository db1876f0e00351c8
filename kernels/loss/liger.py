"""Liger-Kernel's LigerFusedLinearCrossEntropy (Hsu et al. 2024, arXiv:2410.10989), the idea of triton.py.

Its chunks are as small as make the logits weigh what x weighs: at N = 32,768, C = 768 and V = 50,304 they are 64 of
512 tokens, so each product is a small one. dweight is added up in fp32 (its default, the dtype of weight, loses digits
with every chunk). The number of targets that count crosses to the host, so every call waits for the GPU.
"""

from importlib.metadata import version

import torch
from torch import Tensor

from kernels.direct import direct
from kernels.gpu import gpu_unavailable, package_unavailable, triton_detail
from kernels.loss.triton import apply, backward, outputs, setup_context

RUNS = ("liger",)


def unavailable(device: torch.device) -> str | None:
    symbol = "liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy_forward"
    return package_unavailable("liger-kernel", symbol) or gpu_unavailable(device)


def detail(**inputs) -> str:
    return f"liger-kernel {version('liger-kernel')}, {triton_detail(**inputs)}"


@torch.library.custom_op("hotswap::liger_linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, C), weight (V, C), targets (N,) -> the mean loss, fp32, and its gradients dx and dweight (or empty)."""
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    with torch.no_grad():  # as under an autograd.Function: Liger reuses the memory of the logits only there
        x, weight = (tensor.detach().requires_grad_(gradients) for tensor in (x, weight))
        loss, *_, dx, dweight, _ = fused_linear_cross_entropy_forward(
            x, weight, targets, ignore_index=ignore_index, accum_dtype=torch.float32
        )
    return (loss, dx, dweight) if gradients else (loss, x.new_empty(0), x.new_empty(0))


linear_cross_entropy.register_fake(outputs)
linear_cross_entropy = direct(linear_cross_entropy, backward, setup_context)


def loss(x, weight, targets, ignore_index=-1):
    return apply(linear_cross_entropy, x, weight, targets, ignore_index)
