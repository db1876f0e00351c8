"""Rung 11: the forward of FlashAttention. No score leaves the registers.

Rung 10 writes p because a softmax needs its whole row. FlashAttention (Dao et al. 2022, arXiv:2205.14135) multiplies by
v before the row is complete. A program has 128 queries. For each it keeps a running maximum m and two running sums over
the keys: `total` of exp(s - m), and `acc` of exp(s - m) v. When m grows, both sums shrink, as the sum of rung 4 does.
At the end out = acc / total.

With a causal mask a head does 2 T^2 D FLOP for 8 T D bytes, 256 FLOP a byte at T = 1024. The ridge is at 186, so
attention is now compute-bound, and two units may limit it. A score takes 4 D FLOP on the tensor cores, and one
exponential. In a clock a multiprocessor does 4096 FLOP and 16 exponentials, so at D = 64 both take the same time. Two
programs share a multiprocessor, so one can multiply while the other computes exponentials. All other work must be
short. The GPU has an instruction for 2^x, and e^x is 2^(x log2(e)), so Python multiplies the scale by log2(e). Only the
tiles on the diagonal need a mask, and the loop ends there. The last queries have the most keys, so their programs start
first. On an H200 this takes 0.186 ms, and torch.compile 1.03. The rung has no backward. It can run in a trained model:
`python -m scripts.generate checkpoint=out/RUN attn=course/11_flash_forward.py kernels.check=false`.

Exercise: in a sliding window (Beltagy et al. 2020, arXiv:2004.05150) a query sees the last WINDOW keys up to its own.
Write `solution(q, k, v, causal, scale)`, only the forward, with rung 10's arguments. Skip the tiles before the window.
A query may see no key of the first tile: what is exp2(-inf - -inf)? Run `python course/11_flash_forward.py mine.py`.
"""

import torch
import triton
import triton.language as tl

# queries, warps and stages of a program, the most that fit into registers, by D rounded up to a power of two
TILES = {64: (128, 4, 3), 128: (128, 8, 2), 256: (64, 8, 1)}


@triton.jit  # where the elements of the rows t of a head are in a contiguous (B, T, H, D), and whether they exist
def rows(head, t, T, H, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = (head // H * T * H + head % H) * D + t.to(tl.int64)[:, None] * (H * D) + d[None, :]
    return at, (t < T)[:, None] & (d < D)[None, :]


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lengths_ptr, scale, causal, H, Tq, Tk, GROUP, D: tl.constexpr, BLOCK: tl.constexpr
):
    KEYS: tl.constexpr = BLOCK // 2  # of a tile
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    head = tl.program_id(1).to(tl.int64)
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    keys = Tk if lengths_ptr is None else tl.load(lengths_ptr + head // H)
    end = tl.where(causal == 1, i + keys - Tq + 1, keys)  # a query sees the keys before its `end`
    first_end, last_end = tl.min(end, 0), tl.minimum(tl.max(end, 0), keys)
    at_q, in_q = rows(head, i, Tq, H, D, BLOCK_D)
    q = tl.load(q_ptr + at_q, in_q, other=0.0)
    m, total = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for start in range(0, last_end, KEYS):
        j = start + tl.arange(0, KEYS)
        at_k, in_k = rows(head // GROUP, j, Tk, H // GROUP, D, BLOCK_D)  # GROUP query heads read one key head
        s = tl.dot(q, tl.load(k_ptr + at_k, in_k, other=0.0).T, input_precision="ieee")
        if start + KEYS > first_end:  # else each query sees the whole tile
            s = tl.where(j[None, :] < end[:, None], s, -float("inf"))
        before, m = m, tl.maximum(m, tl.max(s, 1) * scale)
        p, shrink = tl.exp2(s * scale - m[:, None]), tl.exp2(before - m)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + at_k, in_k, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    tl.store(out_ptr + at_q, acc / total[:, None], in_q)


def attention(q, k, v, *, causal=True, scale=None, lengths=None):
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise RuntimeError("rung 11 has no backward: train with attn=course/12_flash_backward.py")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, Tq, H, D), (Tk, Hkv), out = q.shape, k.shape[1:3], torch.empty_like(q)
    BLOCK, warps, stages = TILES[max(64, triton.next_power_of_2(D))]
    sizes = {"H": H, "Tq": Tq, "Tk": Tk, "GROUP": H // Hkv, "D": D, "BLOCK": BLOCK, "num_warps": warps}
    grid, scale = (triton.cdiv(Tq, BLOCK), B * H), (scale or D**-0.5) * 1.4426950408889634  # log2(e)
    flash_kernel[grid](q, k, v, out, lengths, scale, int(causal), **sizes, num_stages=stages)
    return out


OP = "attention"
FORWARD_ONLY = True
KERNELS = {"triton": attention}
SHAPES = {"gpu": {"shape": (32, 1024, 12, 64)}, "cpu": {"shape": (2, 200, 2, 32)}}
WINDOW = 100  # of the exercise; your file needs its own


def exercise(q, k, v, causal, scale):
    t = torch.arange(q.shape[1], device=q.device)
    distance = t[:, None] - t
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
    s = s.masked_fill((distance < 0) | (distance >= WINDOW), -torch.inf)
    return (s.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
