"""Rung 11: FlashAttention, forward and backward. The forward is rung 10's, and also stores lse.

Rung 10 does not store p, so the backward recomputes it (Dao et al. 2022, arXiv:2205.14135; in this form Dao 2023,
arXiv:2307.08691). The forward stores lse = m + log(total), 4 bytes a query. Then p = exp(s - lse) takes one matmul and
no running maximum. With s = scale q k^T and out = p v:

    dv = p^T dout    dp = dout v^T    ds = p (dp - delta)    dq = scale ds k    dk = scale ds^T q

delta is the sum of p dp over the keys. It equals the sum of out dout over the channels, which is known before any
score.

dq sums over keys, dk and dv sum over queries, and a program can keep a sum in registers only while it loops along it.
So a program has two loops: over the queries for dk and dv of its 64 keys, then over the keys for dq of its 64 queries.
Both compute s and dp: seven matmuls instead of five. The first keys have the most queries, and the first queries the
fewest keys, so with a causal mask all programs do the same work. A single loop would need atomics for dq, and the bits
of dq would differ from run to run.

Exercise: Gemma 2 (arXiv:2408.00118) caps the scores: s becomes CAP tanh(s / CAP). Write `solution(q, k, v, causal,
scale)`. Its backward is in Triton; PyTorch may compute the forward and lse. tanh(x) is 2 sigmoid(2 x) - 1.

    python course/11_flash_backward.py mine.py
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def rows(head, t, T, H, D, BLOCK_D: tl.constexpr):  # offsets of a head's rows in a contiguous (B, T, H, D); which exist
    d = tl.arange(0, BLOCK_D)
    return ((head // H * T + t[:, None]) * H + head % H) * D + d[None, :], (t < T)[:, None] & (d < D)[None, :]


@triton.jit
def end_of(i, Tq, Tk, CAUSAL: tl.constexpr):  # query i sees the keys before it
    return i + Tk - Tq + 1 if CAUSAL else i * 0 + Tk


@triton.jit
def fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, H, Tq, Tk,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    head, start_i = tl.program_id(1).to(tl.int64), (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK
    i = start_i + tl.arange(0, BLOCK)
    end, last_end = end_of(i, Tq, Tk, CAUSAL), tl.minimum(end_of(start_i + BLOCK - 1, Tq, Tk, CAUSAL), Tk)
    at_q, in_q = rows(head, i, Tq, H, D, BLOCK_D)
    q = tl.load(q_ptr + at_q, in_q, other=0.0)
    m, total = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for start in range(0, last_end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        at_k, in_k = rows(head, j, Tk, H, D, BLOCK_D)
        s = tl.dot(q, tl.load(k_ptr + at_k, in_k, other=0.0).T, input_precision="ieee") * (scale * LOG2E)
        if start + BLOCK > end_of(start_i, Tq, Tk, CAUSAL):
            s = tl.where(j[None, :] < end[:, None], s, -float("inf"))
        before, m = m, tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m[:, None])
        total = total * tl.exp2(before - m) + tl.sum(p, 1)
        v = tl.load(v_ptr + at_k, in_k, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * tl.exp2(before - m)[:, None], input_precision="ieee")
    tl.store(out_ptr + at_q, (acc / total[:, None]).to(q.dtype), in_q)
    tl.store(lse_ptr + head * Tq + i, m + tl.log2(total), i < Tq)


@triton.jit
def bwd_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, scale, H, Tq, Tk,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    head, own = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK
    j = own + tl.arange(0, BLOCK)  # first, these are keys
    at_k, in_k = rows(head, j, Tk, H, D, BLOCK_D)
    k, v = tl.load(k_ptr + at_k, in_k, other=0.0), tl.load(v_ptr + at_k, in_k, other=0.0)
    dk, dv = tl.zeros((BLOCK, BLOCK_D), tl.float32), tl.zeros((BLOCK, BLOCK_D), tl.float32)
    first = tl.maximum(own + Tq - Tk, 0) // BLOCK * BLOCK if CAUSAL else 0  # no query before it sees these keys
    for start in range(first, Tq, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at_q, in_q = rows(head, i, Tq, H, D, BLOCK_D)
        q, dout = tl.load(q_ptr + at_q, in_q, other=0.0), tl.load(dout_ptr + at_q, in_q, other=0.0)
        lse = tl.load(lse_ptr + head * Tq + i, i < Tq, other=0.0)
        delta = tl.load(delta_ptr + head * Tq + i, i < Tq, other=0.0)
        # s is transposed, so p and ds are first factors, which may stay in registers. fp32 rounds as in the forward
        s = tl.dot(q, k.T, input_precision="ieee").T if q.dtype == tl.float32 else tl.dot(k, q.T)
        s *= scale * LOG2E
        if own + BLOCK > end_of(start, Tq, Tk, CAUSAL):
            s = tl.where(j[:, None] < end_of(i, Tq, Tk, CAUSAL)[None, :], s, -float("inf"))
        p = tl.exp2(s - lse[None, :])
        dv = tl.dot(p.to(q.dtype), dout, dv, input_precision="ieee")
        ds = p * (tl.dot(v, dout.T, input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    tl.store(dk_ptr + at_k, (dk * scale).to(k.dtype), in_k)
    tl.store(dv_ptr + at_k, dv.to(k.dtype), in_k)

    i = j  # and now they are queries
    at_q, in_q = rows(head, i, Tq, H, D, BLOCK_D)
    q, dout = tl.load(q_ptr + at_q, in_q, other=0.0), tl.load(dout_ptr + at_q, in_q, other=0.0)
    lse = tl.load(lse_ptr + head * Tq + i, i < Tq, other=0.0)
    delta = tl.load(delta_ptr + head * Tq + i, i < Tq, other=0.0)
    dq = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(end_of(own + BLOCK - 1, Tq, Tk, CAUSAL), Tk), BLOCK):
        j = start + tl.arange(0, BLOCK)
        at_k, in_k = rows(head, j, Tk, H, D, BLOCK_D)
        k, v = tl.load(k_ptr + at_k, in_k, other=0.0), tl.load(v_ptr + at_k, in_k, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * (scale * LOG2E)
        if start + BLOCK > end_of(own, Tq, Tk, CAUSAL):
            s = tl.where(j[None, :] < end_of(i, Tq, Tk, CAUSAL)[:, None], s, -float("inf"))
        ds = tl.exp2(s - lse[:, None]) * (tl.dot(dout, v.T, input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    tl.store(dq_ptr + at_q, (dq * scale).to(q.dtype), in_q)


# torch.compile does not look inside an operator. These two return nothing, and fill the tensors in mutates_args
@torch.library.custom_op("course::flash_fwd", mutates_args=("out", "lse"))
def flash_fwd(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> None:
    grid, sizes = grid_and_sizes(q, k)
    fwd_kernel[grid](q, k, v, out, lse, scale, CAUSAL=causal, **sizes)


@torch.library.custom_op("course::flash_bwd", mutates_args=("grads",))
def flash_bwd(inputs: list[Tensor], grads: list[Tensor], causal: bool, scale: float) -> None:
    grid, sizes = grid_and_sizes(*inputs[:2])
    bwd_kernel[grid](*inputs, *grads, scale=scale, CAUSAL=causal, **sizes)


def grid_and_sizes(q, k):
    (B, Tq, H, D), Tk, BLOCK = q.shape, k.shape[1], 64 if q.shape[-1] * q.element_size() <= 256 else 32
    sizes = {"H": H, "Tq": Tq, "Tk": Tk, "D": D, "BLOCK_D": max(16, triton.next_power_of_2(D)), "BLOCK": BLOCK}
    return (triton.cdiv(max(Tq, Tk), BLOCK), B * H), sizes | {"num_warps": 4 if D <= 64 else 8, "num_stages": 2}


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        out, lse = torch.empty_like(q), q.new_empty(q[..., 0].mT.shape, dtype=torch.float32)  # lse is (B, H, Tq)
        flash_fwd(q, k, v, out, lse, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = causal, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():
            raise RuntimeError("this attention has no second derivative")
        q, k, v, out, lse = ctx.saved_tensors
        delta = (out.float() * dout.float()).sum(-1).mT.contiguous()
        grads = [torch.empty_like(t) for t in (q, k, v)]
        flash_bwd([q, k, v, lse, dout.contiguous(), delta], grads, *ctx.options)
        return *grads, None, None


def attention(q, k, v, *, causal=True, scale=None):
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))  # autograd adds a group's gradients
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return Flash.apply(q.contiguous(), k.contiguous(), v.contiguous(), causal, scale)


OP, CAP = "attention", 2.0
KERNELS = {"triton": attention}
SHAPES = {"gpu": {"shape": (32, 1024, 12, 64)}, "cpu": {"shape": (2, 150, 2, 32)}}


def exercise(q, k, v, causal, scale):
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(q.shape[-1])
    s = (CAP * torch.tanh(s / CAP)).masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    return (s.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
