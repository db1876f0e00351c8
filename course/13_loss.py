"""Rung 13: the head and the cross-entropy in chunks of tokens.

The head, a language model's last matmul, gives each of N tokens V = 50,304 logits, one a word. At N = 65,536 they take
6.6 GB in bf16. The softmax, its gradient and two more matmuls read or write as much. Here the logits never exist as a
whole. For a chunk of tokens one matmul computes the logits, one kernel overwrites them by their gradient, and two
matmuls turn this into dx and dweight. One buffer of 400 MB holds each chunk's logits in turn. So the forward computes
all gradients; the backward multiplies them by dout. Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989) does so.

PyTorch calls cuBLAS for the matmuls: 6 N C V FLOP, 4.9 ms for 16,384 tokens of C = 768 numbers. The kernel is the pass
between them. A row of 50,304 numbers does not fit into registers, so a program reads its row twice. First it keeps a
running maximum and sum, as in rung 4. Then it overwrites the logits by softmax - onehot, the gradient of -log
softmax(logits)[target], where onehot is 1 at the target and else 0. Two reads and a write are 6 bytes a logit, 1.2 ms.
On an H200 forward and backward take 7.18 ms. torch.compile takes 6.99, but stores all logits.

A row whose target is `ignore_index` gets the gradient 0, and the mean divides by the other rows. dweight sums over the
chunks. It stays in fp32, because bf16 would round the sum once a chunk.

Exercise: the z-loss of PaLM (Chowdhery et al. 2022, arXiv:2204.02311) adds z logsumexp(logits)^2 to a token's loss, so
that logits do not drift from 0. Here z is 0.01, because bf16 would hide PaLM's 1e-4. Write `solution(x, weight,
targets)`; targets of -1 do not count. Make two passes over the logits. Run `python course/13_loss.py mine.py`.
"""

import torch
import triton
import triton.language as tl


@triton.jit  # the loss of a row; it overwrites the logits by their gradient
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
    inside = (target >= 0) & (target < V)  # a target that is neither inside nor ignored gives NaN
    target_logit = tl.load(logits_ptr + target, inside, other=float("nan")).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(counts, lse - target_logit, 0.0))
    tl.debug_barrier()  # all threads have read the target's logit before one of them overwrites it
    for start in range(0, V, BLOCK):
        logits = tl.load(logits_ptr + start + columns, start + columns < V, other=0.0).to(tl.float32)
        dlogits = tl.exp(logits - lse) - tl.where(start + columns == target, 1.0, 0.0)
        tl.store(logits_ptr + start + columns, tl.where(counts, dlogits, 0.0), start + columns < V)


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index):  # x (N, C), weight (V, C), targets (N,) -> sum of the losses
        N, V, fp32 = len(x), len(weight), torch.float32
        dx, losses, dweight = torch.empty_like(x), x.new_empty(N, dtype=fp32), torch.zeros_like(weight, dtype=fp32)
        rows = min(N, max(1, LOGITS_BYTES // (V * x.element_size())))  # of a chunk
        buffer = x.new_empty(rows, V)
        for start in range(0, N, rows):
            chunk = slice(start, start + rows)
            logits = torch.mm(x[chunk], weight.T, out=buffer[: N - start])  # the last chunk may be shorter
            cross_entropy_kernel[(len(logits),)](logits, targets[chunk], losses[chunk], ignore_index, V, BLOCK=4096)
            torch.mm(logits, weight, out=dx[chunk])
            dweight += logits.T @ x[chunk]
        ctx.save_for_backward(dx, dweight)
        return losses.sum()

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("kernels.loss=course/13_loss.py has no second derivative: choose kernels=eager")
        (dx, dweight), dout = ctx.saved_tensors, dout.reshape(1)  # a tensor without dimensions is rounded to bf16 first
        return (dx * dout).to(dx.dtype), (dweight * dout).to(dx.dtype), None, None


def loss(x, weight, targets, ignore_index=-1):
    loss_sum = Loss.apply(x.reshape(-1, x.shape[-1]), weight, targets.reshape(-1), ignore_index)
    return loss_sum / (targets != ignore_index).sum().clamp(min=1)


OP = "loss"
LOGITS_BYTES = 400 * 2**20  # of a chunk
KERNELS = {"triton": loss}
SHAPES = {"gpu": {"shape": (16384, 768), "vocab": 50304}, "cpu": {"shape": (60, 32), "vocab": 5000, "ignored": 0.2}}


def exercise(x, weight, targets):
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    return (losses + 0.01 * logits.logsumexp(-1).square())[targets >= 0].mean()


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
