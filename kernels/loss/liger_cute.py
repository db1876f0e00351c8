"""Liger-Kernel's newer loss for Hopper, in CuTe DSL: the forward never writes the logits.

Its forward multiplies x by the head and keeps only the maximum and the sum of exponentials of each token, in registers,
as FlashAttention does with scores. The backward is one kernel. For 1,024 tokens at a time it recomputes the logits,
writes their gradient (100 MB at V = 50,304), and multiplies it into dx and dweight. That is 4 matmuls where liger.py
and triton.py have 3. dweight is summed in bf16, which rounds it once for every 1,024 tokens.

Liger calls this the fused scaled cross-entropy. Its other loss for Hopper needs multiples of 128 tokens and of 256
classes, which 50,304 is not.
"""

from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.gpu import hopper_unavailable, package_unavailable
from kernels.registry import Unavailable

MODULE = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
WIDTH = 64  # Liger's kernels need rows of a multiple of this
RUNS = ("(?i)cross_?entropy|scaledce|fusedbackward",)


def unavailable(device: torch.device) -> str | None:
    missing = package_unavailable("liger-kernel[cutedsl]>=0.8.5", f"{MODULE}.fused_scaled_cross_entropy_backward")
    return missing or hopper_unavailable("loss", device, "liger")


def detail(**inputs: Any) -> str:
    return f"liger-kernel {version('liger-kernel')}, cutlass-dsl {version('nvidia-cutlass-dsl')}"


def compute_losses(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Map x (N, C), weight (V, C) and targets (N,) to the loss and the log-sum-exp of each token, (N,) in fp32.

    The loss of a token with the target ignore_index is 0. C is a multiple of WIDTH.
    """
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import fused_scaled_cross_entropy_forward

    losses, _, lse, *_ = fused_scaled_cross_entropy_forward(x, weight, targets, ignore_index=ignore_index)
    return losses, lse


def empty_losses(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.float32)


def compute_gradients(
    dlosses: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return dx and dweight. dlosses is (N,)."""
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import fused_scaled_cross_entropy_backward

    options = {"temperature": 1.0, "ignore_index": ignore_index, "hidden_size": x.shape[1]}
    return fused_scaled_cross_entropy_backward(dlosses, x, weight, targets, lse, **options)


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.ignore_index = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)  # lse gets no gradient


def _backward(ctx: FunctionCtx, dlosses: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    return *gradients(dlosses, *ctx.saved_tensors, ctx.ignore_index), None, None


gradients = custom_op(
    "hotswap::liger_scaled_cross_entropy_bwd", compute_gradients, lambda dlosses, *inputs: empty_gradients(*inputs[:2])
)
token_losses = custom_op("hotswap::liger_scaled_cross_entropy", compute_losses, empty_losses, _backward, _setup_context)


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1) -> Tensor:
    if x.dtype != torch.bfloat16:
        raise Unavailable(f"loss=liger_cute takes bfloat16, not {x.dtype}: choose kernels.loss=liger")
    x, targets = x.flatten(0, -2), targets.flatten()
    padding = (0, -x.shape[1] % WIDTH)
    x, weight = (F.pad(tensor, padding) if padding[1] else tensor.contiguous() for tensor in (x, weight))
    losses, _ = token_losses(x, weight, targets, ignore_index)
    return losses.sum() / (targets != ignore_index).sum().clamp(min=1)
