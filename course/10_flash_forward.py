"""Rung 10: the forward of FlashAttention, where no score leaves the registers.

Rung 9 writes p because a softmax needs its whole row. FlashAttention (Dao et al. 2022, arXiv:2205.14135) multiplies by
v before the row is complete. A program keeps for each of its 128 queries a running maximum m and two running sums over
the keys: `total` of exp(s - m), and `acc` of exp(s - m) v. When the maximum grows, both sums shrink by the same factor,
exp(m_before - m), as the sum in rung 4 does. At the end out = acc / total.

The kernel reads q, k and v and writes out. A head with a causal mask does 2 T^2 D FLOP for 8 T D bytes, T / 4 FLOP a
byte: 256 at T = 1024. The ridge is at 186, so attention is compute-bound now, and two units may limit it. A score takes
4 D FLOP on the tensor cores, and one exponential. In a clock a multiprocessor does 4096 FLOP and 16 exponentials. At D
= 64 both take the same time, so everything else must be short:

- The GPU has an instruction for 2^x. So the host multiplies the scale by log2(e), and scale and maximum are one
multiply-add before `exp2`. - Only the tiles that the diagonal or the last key crosses need a mask, and tiles above the
diagonal are skipped. - The programs with the most keys start first, so that the last ones are short. - Two programs
share a multiprocessor: one multiplies while the other computes exponentials.

This rung has no backward. `python -m scripts.generate checkpoint=out/RUN attn=course/10_flash_forward.py` generates
text from a trained model.

Exercise: in Mistral's sliding window (Beltagy et al. 2020, arXiv:2004.05150) a query sees only the last WINDOW keys up
to its own position. Write `solution(q, k, v, causal, scale)`, which skips the tiles before the window. Now a query may
see no key of its first tile: what is exp2(-inf - -inf)?

    python course/10_flash_forward.py mine.py
"""

import math

import torch
import triton
import triton.language as tl

# queries, keys and warps of a program, the largest that fit into registers, by D rounded up to a power of two
TILES = {64: (128, 64, 4, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 1)}


@triton.jit
def load_rows(ptr, stride, t, T, d, D):
    """Return the rows t, (T, D), of a matrix whose rows are `stride` apart. What is outside is 0."""
    return tl.load(ptr + t[:, None] * stride + d[None, :], (t < T)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lengths_ptr, q_strides, k_strides, v_strides, scale, H, Tq, Tk, GROUP,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    tiles, d = tl.cdiv(Tq, BLOCK_M), tl.arange(0, BLOCK_D)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    i = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = Tk if lengths_ptr is None else tl.load(lengths_ptr + b)
    end = i + keys - Tq + 1 if CAUSAL else tl.zeros_like(i) + keys  # a query sees the keys before its `end`
    first_end, last_end = tl.min(end, 0), tl.minimum(tl.max(end, 0), keys)
    q = load_rows(q_ptr + b * q_strides[0] + h * q_strides[2], q_strides[1], i.to(tl.int64), Tq, d, D)
    k_ptr += b * k_strides[0] + h // GROUP * k_strides[2]
    v_ptr += b * v_strides[0] + h // GROUP * v_strides[2]
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total, acc = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, last_end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        s = tl.dot(q, load_rows(k_ptr, k_strides[1], j.to(tl.int64), Tk, d, D).T, input_precision="ieee")
        if start + BLOCK_N > first_end:
            s = tl.where(j[None, :] < end[:, None], s, -float("inf"))
        before, m = m, tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - m[:, None])
        shrink = tl.exp2(before - m)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(v_ptr, v_strides[1], j.to(tl.int64), Tk, d, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    out_ptr += ((b * Tq + i) * H + h)[:, None] * D + d[None, :]
    out = acc / total[:, None]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), (i < Tq)[:, None] & (d < D)[None, :])


@torch.library.custom_op("course::flash", mutates_args=())
def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    (B, Tq, H, D), (Tk, Hkv), width = q.shape, k.shape[1:3], max(16, triton.next_power_of_2(q.shape[-1]))
    out = q.new_empty(B, Tq, H, D)
    M, N, num_warps, num_stages = TILES[max(64, width)]
    launch = {"BLOCK_D": width, "BLOCK_M": M, "BLOCK_N": N, "num_warps": num_warps, "num_stages": num_stages}
    sizes = {"H": H, "Tq": Tq, "Tk": Tk, "GROUP": H // Hkv, "D": D}
    strides = {"q_strides": q.stride(), "k_strides": k.stride(), "v_strides": v.stride()}
    grid = (triton.cdiv(Tq, M) * B * H,)
    flash_kernel[grid](
        q, k, v, out, lengths, scale=scale * math.log2(math.e), CAUSAL=causal, **strides, **sizes, **launch
    )
    return out


flash.register_fake(lambda q, *_: q.new_empty(q.shape))


def attention(q, k, v, *, causal=True, scale=None, lengths=None):
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise RuntimeError("rung 10 has no backward: train with attn=course/11_flash_backward.py")
    return flash(q, k, v, lengths, causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)


OP, FORWARD_ONLY = "attention", True  # climb.py asks for no gradients
KERNELS = {"triton": attention}
SHAPES = {"gpu": {"shape": (32, 1024, 12, 64)}, "cpu": {"shape": (2, 200, 2, 32)}}
WINDOW = 100


def exercise(q, k, v, causal, scale):
    t = torch.arange(q.shape[1], device=q.device)
    distance = t[:, None] - t
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(q.shape[-1])
    s = s.masked_fill((distance < 0) | (distance >= WINDOW), -math.inf)
    return (s.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
