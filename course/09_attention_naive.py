"""Rung 9: attention, with a matmul, the scale, the mask and the softmax in one kernel.

Attention is softmax(q k^T scale) v for each head (Vaswani et al. 2017, arXiv:1706.03762). Eager PyTorch makes eight
passes over the T x T scores of each head. One writes them, scale, mask and softmax take two each, and the matmul with v
reads them. For 32 sequences of 1024 tokens and 12 heads a pass has 0.8 GB: 0.19 ms on an H200. All matmuls, forward and
backward, take 0.23 ms.

Here a program multiplies 64 queries of one head by 64 keys at a time, and the scores stay in registers. But the softmax
needs the sum of a whole row before it can write any of it, so the program goes over the keys twice. First it keeps each
row's running maximum and sum, as in rung 4. Then it recomputes the scores and writes p, the probabilities. One matmul
more saves six of the eight passes. PyTorch multiplies p by v, and computes the backward.

With a causal mask, query i sees the keys before i + Tk - Tq + 1, so the last query sees all. With grouped queries
(Ainslie et al. 2023, arXiv:2305.13245) GROUP query heads read one key head. In generation a cache has room for more
tokens than it holds, and `lengths` counts the keys of each sequence.

Exercise: with ALiBi (Press et al. 2021, arXiv:2108.12409) a score loses slope (i - j), where i - j is the distance from
query to key and slope = 2^(-8 (h + 1) / H) for head h. Write `solution(q, k, v, causal, scale)`. No tensor may hold
distances. Does the backward change?

    python course/09_attention_naive.py mine.py
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def probabilities_kernel(
    q_ptr, k_ptr, p_ptr, lengths_ptr, q_strides, k_strides, scale, H, Tq, Tk, GROUP,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    tiles, d = tl.cdiv(Tq, BLOCK), tl.arange(0, BLOCK_D)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    i = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keys = Tk if lengths_ptr is None else tl.load(lengths_ptr + b)
    end = i + keys - Tq + 1 if CAUSAL else tl.zeros_like(i) + keys  # a query sees the keys before its `end`
    q_ptr += b * q_strides[0] + h * q_strides[2]  # (T, D) of this head; the strides are those of (B, T, H, D)
    k_ptr += b * k_strides[0] + h // GROUP * k_strides[2]
    q = tl.load(q_ptr + i[:, None] * q_strides[1] + d[None, :], (i < Tq)[:, None] & (d < D)[None, :], other=0.0)
    largest, total = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, Tk, BLOCK):
        j = start + tl.arange(0, BLOCK).to(tl.int64)
        k = tl.load(k_ptr + j[:, None] * k_strides[1] + d[None, :], (j < Tk)[:, None] & (d < D)[None, :], other=0.0)
        s = tl.where(j[None, :] < end[:, None], tl.dot(q, k.T, input_precision="ieee") * scale, -float("inf"))
        before, largest = largest, tl.maximum(largest, tl.max(s, 1))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(s - largest[:, None]), 1)
    for start in range(0, Tk, BLOCK):
        j = start + tl.arange(0, BLOCK).to(tl.int64)
        k = tl.load(k_ptr + j[:, None] * k_strides[1] + d[None, :], (j < Tk)[:, None] & (d < D)[None, :], other=0.0)
        s = tl.where(j[None, :] < end[:, None], tl.dot(q, k.T, input_precision="ieee") * scale, -float("inf"))
        p = (tl.exp(s - largest[:, None]) / total[:, None]).to(p_ptr.dtype.element_ty)
        tl.store(p_ptr + (head * Tq + i)[:, None] * Tk + j[None, :], p, (i < Tq)[:, None] & (j < Tk)[None, :])


@torch.library.custom_op("course::probabilities", mutates_args=())
def probabilities(q: Tensor, k: Tensor, lengths: Tensor | None, causal: bool, scale: float) -> Tensor:
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    (B, Tq, H, D), (Tk, Hkv) = q.shape, k.shape[1:3]
    p = q.new_empty(B, H, Tq, Tk)
    sizes = {"H": H, "Tq": Tq, "Tk": Tk, "GROUP": H // Hkv, "D": D, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    grid = (triton.cdiv(Tq, 64) * B * H,)
    probabilities_kernel[grid](q, k, p, lengths, q.stride(), k.stride(), scale, CAUSAL=causal, BLOCK=64, **sizes)
    return p


probabilities.register_fake(lambda q, k, *_: q.new_empty(q.shape[0], q.shape[2], q.shape[1], k.shape[1]))


def by_key_head(t, k):  # (B, H, T, X) -> (B, Hkv, GROUP T, X): the query heads of a key head become one long head
    return t.reshape(t.shape[0], k.shape[2], -1, t.shape[-1])


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lengths, causal, scale):
        p = probabilities(q, k, lengths, causal, scale)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.shape = scale, p.shape[:3]
        return (by_key_head(p, k) @ v.transpose(1, 2)).view(*ctx.shape, -1).transpose(1, 2)

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():
            raise RuntimeError("this attention has no second derivative")
        q, k, v, p = ctx.saved_tensors
        p, q, dout = by_key_head(p, k), by_key_head(q.transpose(1, 2), k), by_key_head(dout.transpose(1, 2), k)
        ds = torch._softmax_backward_data(dout @ v.permute(0, 2, 3, 1), p, -1, p.dtype) * ctx.scale  # p (dp - sum p dp)
        dq = (ds @ k.transpose(1, 2)).view(*ctx.shape, -1)
        return *(t.transpose(1, 2) for t in (dq, ds.mT @ q, p.mT @ dout)), None, None, None


def attention(q, k, v, *, causal=True, scale=None, lengths=None):
    return Attention.apply(q, k, v, lengths, causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)


OP = "attention"
KERNELS = {"triton": attention}
SHAPES = {"gpu": {"shape": (32, 1024, 12, 64)}, "cpu": {"shape": (2, 100, 2, 32)}}


def exercise(q, k, v, causal, scale):
    t, h = (torch.arange(size, device=q.device).double() for size in q.shape[1:3])
    distance = t[:, None] - t
    bias = (-(2 ** (-8 * (h + 1) / len(h)))[:, None, None] * distance).to(q.dtype)
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(q.shape[-1]) + bias
    return (s.masked_fill(distance < 0, -math.inf).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
