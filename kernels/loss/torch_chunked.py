"""PyTorch's own loss in chunks, which computes the gradients in the forward: linear_cross_entropy of torch 2.13.

torch.nn.functional.linear_cross_entropy differs from this op in four ways, and this file handles them:

- If every target is ignored, PyTorch's mean and its gradients are NaN. So this file computes a sum in which every class
  has the same weight. The weight is the largest power of two up to 1 / count, because PyTorch rounds it to the dtype of
  x. loss() divides by the remaining factor.
- Its backward rounds the gradient of the loss to the dtype of x, and multiplies by it. So this file takes the gradients
  from PyTorch's operator, and multiplies them in fp32.
- In fp16 its sum overflows, and its gradients underflow. So this backend does not take fp16.
- It needs the number of rows as a Python int, so torch.compile makes a graph for each length. torch.compile does not
  look into an operator of ours.

PyTorch sums the loss and dweight over the chunks in the dtype of x, so the sums lose digits with every chunk. At 32,768
tokens, C = 768 and V = 50,304 PyTorch's default is 128 chunks; LOGITS_BYTES makes it 25. In bf16 (3,200 tokens,
C = 64, V = 5,000, on a CPU), the loss is off by 3.9% with 128 chunks and by 0.3% with 25 chunks. Compared with a single
chunk, the error of dweight is 11 times as large with 128 chunks, and 4 times as large with 25 chunks.
"""

import torch
from torch import Tensor

from kernels import compat
from kernels.direct import custom_op
from kernels.loss._in_forward import backward, setup_context
from kernels.registry import Unavailable

LOGITS_BYTES = 2**28  # the size of one chunk's logits in fp32
deterministic = False  # PyTorch computes dweight with index_add_, which adds by atomics, in any order


def unavailable(device: torch.device) -> str | None:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"it needs torch 2.13 or newer, and this is {torch.__version__}: pip install 'torch>=2.13'"
    return None


def compute_loss(
    x: Tensor, weight: Tensor, targets: Tensor, class_weight: Tensor, ignore_index: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of class_weight * loss in fp32, and its gradients for x (N, C), weight (V, C) and targets (N,).

    class_weight is a scalar. dx and dweight have the dtype of x. If gradients is False, they are empty.
    """
    rows = max(1, LOGITS_BYTES // (4 * len(weight)))
    class_weights = class_weight.expand(len(weight))
    loss, dx, dweight = compat.chunked_cross_entropy(x, weight, targets, class_weights, ignore_index, rows, gradients)
    return loss.float(), dx, dweight


def empty_outputs(
    x: Tensor, weight: Tensor, targets: Tensor, class_weight: Tensor, ignore_index: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight = (tensor.new_empty(tensor.shape if gradients else (0, 0)) for tensor in (x, weight))
    return x.new_empty((), dtype=torch.float32), dx, dweight


linear_cross_entropy = custom_op(
    "hotswap::torch_linear_cross_entropy", compute_loss, empty_outputs, backward, setup_context
)


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1) -> Tensor:
    if x.dtype == torch.float16:
        raise Unavailable("loss=torch_chunked sums losses in float16, which overflows: choose kernels.loss=eager")
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    count = (targets != ignore_index).sum().clamp(min=1).float()
    class_weight = torch.exp2(-torch.ceil(torch.log2(count)))
    weighted_sum, _, _ = linear_cross_entropy(x, weight, targets, class_weight, ignore_index, gradients)
    return weighted_sum / (class_weight * count)
