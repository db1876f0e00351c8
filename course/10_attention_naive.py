"""Rung 10: attention, with a matmul, the scale, the mask and the softmax in one kernel.

Attention is softmax(scale q k^T) v for each head (Vaswani et al. 2017, arXiv:1706.03762). Eager PyTorch makes eight
passes over the T x T scores of each head: a matmul writes them, scale, mask and softmax make two passes each, and the
matmul with v reads them. With 32 x 1024 tokens and 12 heads a pass takes 0.19 ms on an H200, and a matmul 0.07 ms.

Here a program multiplies 64 queries of one head by 64 keys at a time, and the scores stay in registers. But the softmax
needs the sum of a whole row before it can write any of it, so the program goes over the keys twice. First it keeps each
row's running maximum and sum, as in rung 4. Then it recomputes the scores and writes p, the probabilities. One more
matmul saves six of the eight passes. PyTorch computes p v and the backward, so p still goes to memory, and three
operators read it. On an H200 forward and backward take 3.63 ms, PyTorch 7.45, and torch.compile 2.61.

With Tq queries and Tk keys, a causal mask shows query i the keys before i + Tk - Tq + 1. With grouped queries (Ainslie
et al. 2023, arXiv:2305.13245) several query heads read one key head. In generation sequence b has lengths[b] keys.

Exercise: with ALiBi (Press et al. 2021, arXiv:2108.12409) the score of query i and key j loses slope (i - j), where
slope is 2^(-8 (h + 1) / H) for head h (use `tl.exp2`). Write `solution(q, k, v, causal, scale)`: q is (B, T, H, D),
causal True, and scale None: D^-0.5. Load no i - j from memory. Run `python course/10_attention_naive.py mine.py`.
"""

import torch
import triton
import triton.language as tl


@triton.jit  # q (B, H, Tq, D) and k (B, H, Tk, D) -> p (B, H, Tq, Tk)
def probabilities_kernel(
    q_ptr, k_ptr, p_ptr, lengths_ptr, scale, H, Tq, Tk, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    BLOCK: tl.constexpr = 64
    head, d = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)  # head % H of sequence head // H
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = Tk if lengths_ptr is None else tl.load(lengths_ptr + head // H)
    end = i + keys - Tq + 1 if CAUSAL else tl.zeros_like(i) + keys  # a query sees the keys before its `end`
    q_ptr, k_ptr, p_ptr = q_ptr + head * Tq * D, k_ptr + head * Tk * D, p_ptr + head * Tq * Tk
    q = tl.load(q_ptr + i[:, None] * D + d[None, :], (i < Tq)[:, None] & (d < D)[None, :], other=0.0)
    largest, total = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for write in tl.static_range(2):  # the compiler unrolls this loop
        for start in range(0, Tk, BLOCK):
            j = start + tl.arange(0, BLOCK)
            k = tl.load(k_ptr + j[:, None] * D + d[None, :], (j < Tk)[:, None] & (d < D)[None, :], other=0.0)
            s = tl.where(j[None, :] < end[:, None], tl.dot(q, k.T, input_precision="ieee") * scale, -float("inf"))
            if write:
                p = tl.exp(s - largest[:, None]) / total[:, None]
                tl.store(p_ptr + i.to(tl.int64)[:, None] * Tk + j[None, :], p, (i < Tq)[:, None] & (j < Tk)[None, :])
            else:
                before, largest = largest, tl.maximum(largest, tl.max(s, 1))
                total = total * tl.exp(before - largest) + tl.sum(tl.exp(s - largest[:, None]), 1)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lengths, causal, scale):
        (B, H, Tq, D), Tk = q.shape, k.shape[2]
        p, grid = q.new_empty(B, H, Tq, Tk), (triton.cdiv(Tq, 64), B * H)
        constants = {"CAUSAL": causal, "D": D, "BLOCK_D": max(16, triton.next_power_of_2(D))}
        probabilities_kernel[grid](q, k, p, lengths, scale, H, Tq, Tk, **constants)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return p @ v

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("attn=course/10_attention_naive.py has no second derivative: choose attn=eager")
        q, k, v, p = ctx.saved_tensors
        dp = dout @ v.mT
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype) * ctx.scale  # p (dp - the row's sum of p dp) scale
        return ds @ k, ds.mT @ q, p.mT @ dout, None, None, None


def attention(q, k, v, *, causal=True, scale=None, lengths=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))  # copies: autograd adds their gradients
    return Attention.apply(q.contiguous(), k, v, lengths, causal, scale or q.shape[-1] ** -0.5).transpose(1, 2)


OP = "attention"
KERNELS = {"triton": attention}
SHAPES = {"gpu": {"shape": (32, 1024, 12, 64)}, "cpu": {"shape": (2, 100, 2, 32)}}


def exercise(q, k, v, causal, scale):
    t, h = (torch.arange(size, device=q.device).double() for size in q.shape[1:3])
    distance = t[:, None] - t
    bias = (-(2 ** (-8 * (h + 1) / len(h)))[:, None, None] * distance).to(q.dtype)
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5 + bias
    return (s.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
