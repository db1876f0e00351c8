"""Plain PyTorch: all logits at once, and their log-probabilities in fp32.

At 65,536 tokens and V = 50,304 the logits take 6.1 GiB and the log-probabilities 12.3 GiB.

The derivative, softmax - onehot, is written by hand: one pass from the log-probabilities to a bf16 gradient. Autograd
would make more passes: fill, scatter, the backward of the softmax in fp32, and a cast. It would also need 6.1 GiB more:
a step of 124M with 64 sequences takes 53.1 GiB with the derivative by hand. With fp8 or softcap the derivative is
autograd's.

Log-probabilities in bf16 would take half the memory. But bf16 rounds numbers between -8 and -16 to steps of 1/16. Rows
with similar predictions get the same rounding error, so the errors do not average out, and dweight is too far from the
float64 result (test_rounding_errors_of_the_loss_average_out).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.loss import cap_logits, logits_in_fp8, scale_gradient


class LinearCrossEntropy(torch.autograd.Function):
    """Map x (N, C), weight (V, C) and targets (N,) to the sum of -log softmax(x weight^T)[target].

    The sum is in fp32, or in float64 if x is float64.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        log_probs = F.linear(x, weight).log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, log_probs, targets)
        ctx.ignore_index = ignore_index
        return F.nll_loss(log_probs, targets, ignore_index=ignore_index, reduction="sum")

    @staticmethod
    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, log_probs, targets = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: PyTorch's own derivative can be differentiated again
            x, weight = x.view_as(x), weight.view_as(weight)  # without views, dweight would have a part through x
            loss_sum = linear_cross_entropy(x, weight, targets, ctx.ignore_index)
            leaves = [tensor for tensor in (x, weight) if tensor.requires_grad]
            gradients = iter(torch.autograd.grad(loss_sum, leaves, dout, create_graph=True))
            return *(next(gradients) if tensor.requires_grad else None for tensor in (x, weight)), None, None
        not_ignored = (targets != ctx.ignore_index).unsqueeze(-1)
        targets = targets.unsqueeze(-1).where(not_ignored, 0)
        dlogits = torch.exp(log_probs, out=torch.empty_like(log_probs, dtype=x.dtype))
        dlogits.scatter_(-1, targets, log_probs.gather(-1, targets).expm1().to(x.dtype))
        # scale and mask (N, C) and (V, C) tensors: multiplying dlogits would read and write 13 GB at 65,536 tokens
        with torch.autocast(x.device.type, enabled=False):  # .backward() may be called under autocast
            dx, dweight = dlogits @ weight, dlogits.T @ (x * not_ignored)
        return scale_gradient(dx, dout * not_ignored, x.dtype), scale_gradient(dweight, dout, x.dtype), None, None


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, fp8: bool = False, softcap: float | None = None
) -> Tensor:
    """Compute what LinearCrossEntropy computes, with PyTorch's own derivative. torch.compile fuses it into one pass."""
    logits = logits_in_fp8(x, weight, targets, ignore_index) if fp8 else F.linear(x, weight)
    logits = cap_logits(logits.to(torch.promote_types(x.dtype, torch.float32)), softcap)
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


def loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    fp8: bool = False,
    softcap: float | None = None,
) -> Tensor:
    x, targets = x.flatten(0, -2), targets.flatten()
    if fp8 or softcap is not None or torch.compiler.is_compiling():
        loss_sum = linear_cross_entropy(x, weight, targets, ignore_index, fp8, softcap)
    else:
        loss_sum = LinearCrossEntropy.apply(x, weight, targets, ignore_index)
    return loss_sum / (targets != ignore_index).sum().clamp(min=1)
