"""Rung 12: FlashAttention, forward and backward. The forward is rung 11's, and also stores lse.

Rung 11 does not store p, so the backward recomputes it (Dao 2023, arXiv:2307.08691). The forward stores the log-sum-exp
lse = m + log(total), 4 bytes a query. Then p = exp(s - lse) takes one matmul and no maximum. With s = scale q k^T:

    dv = p^T dout    dp = dout v^T    ds = p (dp - delta)    dq = scale ds k    dk = scale ds^T q

delta is the sum of p dp over the keys. It equals the sum of out dout over the channels, so PyTorch computes it first.
dq sums over keys, dk and dv sum over queries, and a sum stays in registers while a program loops over what it sums. So
a program has two loops: over the queries for dk and dv of its 64 keys, then over the keys for dq of its 64 queries.
Both compute s and dp: seven matmuls instead of five. The first keys have the most queries, and the first queries the
fewest keys, so with a causal mask all programs do the same work. A single loop would need atomics for dq, and the bits
of dq would differ from run to run. On an H200 forward and backward take 1.22 ms, and torch.compile 2.61.

Exercise: Gemma 2 (arXiv:2408.00118) caps the scores: s becomes CAP tanh(s / CAP), here with CAP = 2. Write
`solution(q, k, v, causal, scale)` with rung 10's arguments. Its backward is in Triton; PyTorch may compute the forward
and lse. Use tanh(x) = 2 sigmoid(2 x) - 1. Run `python course/12_flash_backward.py mine.py`.
"""

import torch
import triton
import triton.language as tl

BLOCK, LOG2E = tl.constexpr(64), tl.constexpr(1.4426950408889634)  # queries or keys of a tile, and log2(e)


@triton.jit  # as in rung 11, for the BLOCK rows from `start` on
def rows(head, start, T, H, D: tl.constexpr):
    t, d = start + tl.arange(0, BLOCK), tl.arange(0, triton.next_power_of_2(D))
    at = (head // H * T * H + head % H) * D + t.to(tl.int64)[:, None] * (H * D) + d[None, :]
    return t, at, (t < T)[:, None] & (d < D)[None, :]


@triton.jit
def fwd_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, lengths_ptr, scale, seen, H, Tq, Tk, D: tl.constexpr):
    head, own = tl.program_id(1).to(tl.int64), (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK
    keys = Tk if lengths_ptr is None else tl.load(lengths_ptr + head // H)
    i, at_q, in_q = rows(head, own, Tq, H, D)
    end = tl.minimum(seen - Tk + keys + i, keys)  # query 0 sees `seen` keys, query i the keys before its `end`
    q = tl.load(q_ptr + at_q, in_q, other=0.0)
    m, total = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    for start in range(0, tl.max(end, 0), BLOCK):
        j, at_k, in_k = rows(head, start, Tk, H, D)
        k, v = tl.load(k_ptr + at_k, in_k, other=0.0), tl.load(v_ptr + at_k, in_k, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * (scale * LOG2E)
        if start + BLOCK > tl.min(end, 0):
            s = tl.where(j[None, :] < end[:, None], s, -float("inf"))
        before, m = m, tl.maximum(m, tl.max(s, 1))
        p, shrink = tl.exp2(s - m[:, None]), tl.exp2(before - m)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    tl.store(out_ptr + at_q, acc / total[:, None], in_q)
    tl.store(lse_ptr + head * Tq + i, m + tl.log2(total), i < Tq)  # lse log2(e), for tl.exp2


@triton.jit
def bwd_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, scale, seen, H, Tq, Tk, D: tl.constexpr
):
    head, own = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK
    lse_ptr, delta_ptr = lse_ptr + head * Tq, delta_ptr + head * Tq
    j, at_k, in_k = rows(head, own, Tk, H, D)  # first, the program's own rows are keys
    k, v = tl.load(k_ptr + at_k, in_k, other=0.0), tl.load(v_ptr + at_k, in_k, other=0.0)
    dk, dv = tl.zeros(k.shape, tl.float32), tl.zeros(k.shape, tl.float32)
    for start in range(tl.maximum(own - seen + 1, 0) // BLOCK * BLOCK, Tq, BLOCK):  # no query before sees these keys
        i, at_q, in_q = rows(head, start, Tq, H, D)
        q, dout = tl.load(q_ptr + at_q, in_q, other=0.0), tl.load(dout_ptr + at_q, in_q, other=0.0)  # rows of 0 add 0
        lse, delta = tl.load(lse_ptr + i, i < Tq, other=0.0), tl.load(delta_ptr + i, i < Tq, other=0.0)
        # s is (keys, queries): p and ds are first factors, which may stay in registers. fp32 rounds as in the forward
        s = tl.dot(q, k.T, input_precision="ieee").T if q.dtype == tl.float32 else tl.dot(k, q.T)
        if own + BLOCK > tl.minimum(seen + start, Tk):
            s = tl.where(j[:, None] < tl.minimum(seen + i, Tk)[None, :], s, -float("inf"))
        p = tl.exp2(s * (scale * LOG2E) - lse[None, :])
        dv = tl.dot(p.to(q.dtype), dout, dv, input_precision="ieee")
        ds = p * (tl.dot(v, dout.T, input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    tl.store(dk_ptr + at_k, dk * scale, in_k)
    tl.store(dv_ptr + at_k, dv, in_k)
    i, at_q, in_q = rows(head, own, Tq, H, D)  # and now they are queries
    end = tl.minimum(seen + i, Tk)
    q, dout = tl.load(q_ptr + at_q, in_q, other=0.0), tl.load(dout_ptr + at_q, in_q, other=0.0)
    lse, delta = tl.load(lse_ptr + i, i < Tq, other=0.0), tl.load(delta_ptr + i, i < Tq, other=0.0)
    dq = tl.zeros(q.shape, tl.float32)
    for start in range(0, tl.max(end, 0), BLOCK):
        j, at_k, in_k = rows(head, start, Tk, H, D)
        k, v = tl.load(k_ptr + at_k, in_k, other=0.0), tl.load(v_ptr + at_k, in_k, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee")
        if start + BLOCK > tl.min(end, 0):
            s = tl.where(j[None, :] < end[:, None], s, -float("inf"))
        ds = tl.exp2(s * (scale * LOG2E) - lse[:, None]) * (tl.dot(dout, v.T, input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    tl.store(dq_ptr + at_q, dq * scale, in_q)


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lengths, causal, scale):
        (B, Tq, H, D), Tk = q.shape, k.shape[1]
        out, lse = torch.empty_like(q), q.new_empty(B, H, Tq, dtype=torch.float32)
        ctx.options = {"seen": Tk - Tq + 1 if causal else Tk, "H": H, "Tq": Tq, "Tk": Tk, "D": D, "scale": scale}
        ctx.options |= {"num_warps": 4 if D <= 64 else 8, "num_stages": 2}
        fwd_kernel[triton.cdiv(Tq, 64), B * H](q, k, v, out, lse, lengths, **ctx.options)  # lengths: never in training
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("attn=course/12_flash_backward.py has no second derivative: choose attn=eager")
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = (out.float() * dout.float()).sum(-1).mT.contiguous()
        grid = triton.cdiv(max(q.shape[1], k.shape[1]), 64), q.shape[0] * q.shape[2]
        bwd_kernel[grid](q, k, v, lse, dout.contiguous(), delta, dq, dk, dv, **ctx.options)
        return dq, dk, dv, None, None, None


def attention(q, k, v, *, causal=True, scale=None, lengths=None):
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))  # autograd adds the gradients of a group
    return Flash.apply(q.contiguous(), k, v, lengths, causal, scale or q.shape[-1] ** -0.5)


OP = "attention"
KERNELS = {"triton": attention}
SHAPES = {"gpu": {"shape": (32, 1024, 12, 64)}, "cpu": {"shape": (2, 150, 2, 32)}}


def exercise(q, k, v, causal, scale):
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
    s = (2 * torch.tanh(s / 2)).masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    return (s.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
