"""PyTorch's own loss in chunks, which computes the gradients in the forward: linear_cross_entropy of torch 2.13.

torch.nn.functional.linear_cross_entropy differs from this op in four ways, and this file handles them:

- If every target is ignored, PyTorch's mean and its gradients are NaN. So this file computes a sum in which every class
  has the same weight. It is the power of two below 1 / count, because PyTorch rounds it to the dtype of x.
- Its backward rounds the gradient of the loss to the dtype of x, and multiplies by it. So ChunkedLoss takes PyTorch's
  gradients for 1, and multiplies in fp32.
- In fp16 its sum overflows, and its gradients underflow. So this backend does not take fp16.
- Dynamo breaks the graph at the Python code around PyTorch's custom op. The custom op has a fake implementation and a
  backward of its own, so allow_in_graph can put the whole call into the graph as one node.

PyTorch sums the loss and dweight over the chunks in the dtype of x, so the sums lose digits with every chunk. At 32,768
tokens, C = 768 and V = 50,304 PyTorch's default is 128 chunks; LOGITS_BYTES makes it 25. In bf16 (3,200 tokens,
C = 64, V = 5,000, on a CPU), the loss is off by 3.9% with 128 chunks and by 0.3% with 25 chunks. Compared with a single
chunk, the error of dweight is 11 times as large with 128 chunks, and 4 times as large with 25 chunks.
"""

import torch
import torch.nn.functional as F

from kernels.direct import first_derivative
from kernels.loss import scale_gradient
from kernels.registry import Unavailable

LOGITS_BYTES = 2**28  # the size of one chunk's logits in fp32
deterministic = False  # PyTorch computes dweight with index_add_, which adds by atomics, in any order


def unavailable(device: torch.device) -> str | None:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"it needs torch 2.13 or newer, and this is {torch.__version__}: pip install 'torch>=2.13'"
    return None


class ChunkedLoss(torch.autograd.Function):
    """Map x (N, C), weight (V, C), targets (N,) and class_weight (V,) to the sum of class_weight[target] * loss."""

    @staticmethod
    def forward(ctx, x, weight, targets, class_weight, ignore_index, differentiate):
        rows = min(len(x), max(1, LOGITS_BYTES // (4 * len(weight))))
        # torch.compile needs allow_retain_graph; otherwise PyTorch sets it, and warns
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, allow_retain_graph=True)
        with torch.set_grad_enabled(differentiate):
            x, weight = (tensor.detach().requires_grad_(differentiate) for tensor in (x, weight))
            loss = F.linear_cross_entropy(
                x, weight, targets, weight=class_weight, reduction="sum", ignore_index=ignore_index, options=options
            )
            if differentiate:
                ctx.save_for_backward(*torch.autograd.grad(loss, (x, weight)))
        return loss.detach().to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    @first_derivative
    def backward(ctx, dout):
        return *(scale_gradient(gradient, dout, gradient.dtype) for gradient in ctx.saved_tensors), *[None] * 4


@torch.compiler.allow_in_graph
def linear_cross_entropy(*arguments):
    return ChunkedLoss.apply(*arguments)


def loss(x, weight, targets, ignore_index=-1):
    if x.dtype == torch.float16:
        raise Unavailable("loss=torch_chunked sums losses in float16, which overflows: choose kernels.loss=eager")
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    count = (targets != ignore_index).sum().clamp(min=1).float()
    class_weight = torch.exp2(-torch.ceil(torch.log2(count)))
    differentiate = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    class_weights = class_weight.expand(len(weight))
    weighted_sum = linear_cross_entropy(x, weight, targets, class_weights, ignore_index, differentiate)
    return weighted_sum / (class_weight * count)
