"""Rung 12: the head and the cross-entropy, in chunks of tokens.

The head multiplies N tokens by V = 50,304 words. At N = 65,536 the logits have 6.6 GB in bf16. The softmax, its
gradient and two more matmuls read and write them, and a float copy is twice as large. Here they never exist as a whole.
For a chunk of tokens a matmul computes the logits, one kernel overwrites them by their gradient, and two matmuls turn
it into dx and dweight. One buffer of 400 MB holds the logits of each chunk in turn. So the forward computes all
gradients, and the backward only multiplies them by dout. Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989) works this
way.

cuBLAS computes the three matmuls, called by PyTorch: 6 N C V FLOP, 4.9 ms for 16,384 tokens on an H200. The kernel here
is the pass between them. A row of 50,304 numbers does not fit into registers, so a program reads its row twice. The
first time it keeps a running maximum and sum, the online softmax of rung 4. The second time it writes softmax - onehot
over the logits: the derivative of -log softmax(logits)[target]. That is two reads and one write, 6 bytes a logit: 1.2
ms. Rows whose target is `ignore_index` get 0.

dweight sums over all tokens, so over all chunks. The sum is in fp32: bf16 would round it once a chunk. The mean divides
by the number of targets that count.

Exercise: the z-loss of PaLM (Chowdhery et al. 2022, arXiv:2204.02311) adds 1e-4 logsumexp^2 to the loss of a token, so
that logits do not drift away from 0. Write `solution(x, weight, targets)`; its gradient must come from the same pass
over the logits.

    python course/12_loss.py mine.py
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_BYTES = 400 * 2**20  # of logits


@triton.jit
def cross_entropy_kernel(logits_ptr, targets_ptr, losses_ptr, ignore_index, V, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits_ptr += row * V
    target = tl.load(targets_ptr + row)
    largest, total = -float("inf"), 0.0
    for start in range(0, V, BLOCK):
        logits = tl.load(logits_ptr + start + columns, start + columns < V, other=-float("inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(logits, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(logits - largest), 0)
    lse, counts = largest + tl.log(total), target != ignore_index
    inside = (target >= 0) & (target < V)  # another target gives NaN
    target_logit = tl.load(logits_ptr + target, inside, other=float("nan")).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(counts, lse - target_logit, 0.0))
    tl.debug_barrier()  # all threads have read the target's logit before one of them overwrites it
    for start in range(0, V, BLOCK):
        logits = tl.load(logits_ptr + start + columns, start + columns < V, other=0.0).to(tl.float32)
        dlogits = tl.exp(logits - lse) - tl.where(start + columns == target, 1.0, 0.0)
        dlogits = tl.where(counts, dlogits, 0.0).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + start + columns, dlogits, start + columns < V)


@torch.library.custom_op("course::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> list[Tensor]:
    """x (N, C), weight (V, C), targets (N,) -> the sum of the losses, and its gradients dx and dweight (in fp32)."""
    (N, C), V = x.shape, len(weight)
    losses, dx = x.new_empty(N, dtype=torch.float32), torch.empty_like(x)
    dweight = weight.new_zeros(V, C, dtype=torch.float32)
    rows = max(1, CHUNK_BYTES // (V * x.element_size()))
    for start in range(0, N, rows):
        chunk = slice(start, start + rows)
        logits = x[chunk] @ weight.T
        cross_entropy_kernel[(len(logits),)](
            logits, targets[chunk], losses[chunk], ignore_index, V, BLOCK=4096, num_warps=8
        )
        torch.mm(logits, weight, out=dx[chunk])
        dweight += logits.T @ x[chunk]
    return [losses.sum(), dx, dweight]


@linear_cross_entropy.register_fake
def _(x, weight, targets, ignore_index):
    return [x.new_empty((), dtype=torch.float32), torch.empty_like(x), weight.float()]


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index):
        loss_sum, dx, dweight = linear_cross_entropy(x, weight, targets, ignore_index)
        ctx.save_for_backward(dx, dweight)
        return loss_sum

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():
            raise RuntimeError("this loss has no second derivative")
        (dx, dweight), dout = ctx.saved_tensors, dout.reshape(1)  # a tensor without dimensions is rounded to bf16 first
        return (dx * dout).to(dx.dtype), (dweight * dout).to(dx.dtype), None, None


def loss(x, weight, targets, ignore_index=-1):
    loss_sum = Loss.apply(x.reshape(-1, x.shape[-1]), weight, targets.reshape(-1), ignore_index)
    return loss_sum / (targets != ignore_index).sum().clamp(min=1)


OP = "loss"
KERNELS = {"triton": loss}
SHAPES = {"gpu": {"shape": (16384, 768), "vocab": 50304}, "cpu": {"shape": (60, 32), "vocab": 5000, "ignored": 0.2}}


def exercise(x, weight, targets):
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))
    z_loss = 1e-4 * logits.logsumexp(-1).square()
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none") + z_loss
    return losses[targets >= 0].mean()


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
