"""d(lse^2) / d(logit) is 2 lse p, so the second pass writes p (1 + 0.02 lse) - onehot, with no more bytes."""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(logits_ptr, targets_ptr, losses_ptr, V, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits_ptr += row * V
    target = tl.load(targets_ptr + row)
    counts = target >= 0
    largest, total = -float("inf"), 0.0
    for start in range(0, V, BLOCK):
        logits = tl.load(logits_ptr + start + columns, start + columns < V, other=-float("inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(logits, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(logits - largest), 0)
    lse = largest + tl.log(total)
    target_logit = tl.load(logits_ptr + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(counts, lse - target_logit + 0.01 * lse * lse, 0.0))
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        logits = tl.load(logits_ptr + start + columns, start + columns < V, other=0.0).to(tl.float32)
        dlogits = tl.exp(logits - lse) * (1 + 0.02 * lse) - tl.where(start + columns == target, 1.0, 0.0)
        dlogits = tl.where(counts, dlogits, 0.0).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + start + columns, dlogits, start + columns < V)


class LossWithZ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets):
        (N, C), V = x.shape, len(weight)
        losses, dx = x.new_empty(N, dtype=torch.float32), torch.empty_like(x)
        dweight = weight.new_zeros(V, C, dtype=torch.float32)
        for start in range(0, N, 4096):
            chunk = slice(start, start + 4096)
            logits = x[chunk] @ weight.T
            kernel[(len(logits),)](logits, targets[chunk], losses[chunk], V, BLOCK=4096)
            torch.mm(logits, weight, out=dx[chunk])
            dweight += logits.T @ x[chunk]
        ctx.save_for_backward(dx, dweight)
        return losses.sum()

    @staticmethod
    def backward(ctx, dout):
        (dx, dweight), dout = ctx.saved_tensors, dout.reshape(1)
        return (dx * dout).to(dx.dtype), (dweight * dout).to(dx.dtype), None


def solution(x, weight, targets):
    return LossWithZ.apply(x.contiguous(), weight, targets) / (targets >= 0).sum()
