"""FlashAttention-2 (Dao 2023, arXiv:2307.08691) in Triton: of the scores there is a tile at a time, in registers.

Forward: a program takes BLOCK_M queries of one head and walks over the keys, BLOCK_N at a time. For each query it
holds m, the largest score so far, l, the sum of exp(s - m), and acc, the sum of exp(s - m) v. A tile that brings a
larger m' makes what was summed worth exp(m - m') of itself (Milakov and Gimelshein 2018, arXiv:1805.02867):

    l = l exp(m - m') + sum_keys exp(s - m')    acc = acc exp(m - m') + exp(s - m') v    and at the end out = acc / l

Backward: lse = m + log l is all that is kept, 4 bytes a query and head, because p = exp(s - lse) is a product away.
With s = scale q k^T, p = softmax(s), out = p v:

    dv = p^T dout    dp = dout v^T    ds = p (dp - delta)    dq = scale ds k    dk = scale ds^T q

A softmax's Jacobian is diag(p) - p p^T, so delta is each row's sum of p dp; and that is sum_keys p (dout . v) =
dout . out, a number a query which no tile has to wait for.

A product is 2 Tq Tk D FLOP a head, half of it where causal. The forward has two, over 8 T D bytes of q, k, v and out:
T / 4 FLOP a byte, 256 at T = 1024, where an H200's ridge is at 186. So it is bound by arithmetic, and at D = 64 not by
the products alone: a multiprocessor does 4096 FLOP a clock in tensor cores but 16 exponentials, and a score costs 256
FLOP and one of them (Shah et al. 2024, arXiv:2407.08608). Two programs a multiprocessor do the one while the other does
the other; exp2 with the factor scale log2(e) in its multiply-add, and masks for those tiles alone that an edge crosses
(the diagonal, a window's or a document's beginning, the last key), keep what is besides small.

The backward has five products. dq is a sum over keys, dk and dv are sums over queries: one loop order has one of them
in registers. So a kernel does each, and each forms s and dp: seven products, every sum in a fixed order, the same bits
each time. The first, for dq, has dout and out at hand, so delta needs no pass. With five, dq is added up in memory, 8 D
bytes a query for every tile of keys: by atomics, whose order is another each time, or by programs that wait for each
other, or by one that takes a whole head. That is _gluon_backward.py's way, on Hopper, where D = 64, T <= 1024 and heads
are enough for all multiprocessors; it says why no further.

q, k and v may be views of one packed tensor: tiles are fetched by strides, by TMA on Hopper. Their gradients are views
of one buffer in the same order, so that nobody has to concatenate them: packed.py.

A decoding step has a query a head, reads all keys, and is bound by their bytes; with 12 heads it would keep 12 of 132
multiprocessors busy. So the keys go in parts to several programs, and a second kernel weighs the parts' results.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import _gluon_backward
from kernels.attention._triton_backward import backward
from kernels.attention._triton_tiles import (
    LOG2E,
    by_tma,
    candidates,  # noqa: F401
    check,
    launch,
    limits,
    load_tile,
    place,
    source,
    span,
    store_tile,
)
from kernels.direct import direct
from kernels.gpu import processors, triton_detail
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.packed import buffer, parted
from kernels.registry import Unavailable

LEAST = tl.constexpr(-1e30)  # below every score, and finite: -inf - -inf is no number
FORWARD = "^_fwd_kernel|::attention_fwd"
KEEPS = ("hotswap::attention_fwd",)
RUNS = {"Gluon": (FORWARD, "attention_bwd_gluon"), "triton": (FORWARD, "^_dq_kernel|::attention_bwd")}


@triton.jit(do_not_specialize=["heads", "Tq", "Tk", "lse_stride", "window", "span"])
def _fwd_kernel(
    q_ptr,  # (B, Tq, H, D)
    k_ptr,  # (B, Tk, Hkv, D), and so is v
    v_ptr,
    out_ptr,  # (SPLITS B, Tq, H, D)
    lse_ptr,  # (SPLITS B H, Tq) fp32
    starts_ptr,  # (B, Tq) int32, or None
    lengths_ptr,  # (B,) int32, or None
    q_strides,  # between sequences, tokens, heads
    k_strides,
    v_strides,
    out_strides,
    lse_stride,
    scale,
    window,
    heads,  # B H
    H,
    Tq,
    Tk,
    span,
    D: tl.constexpr,
    GROUP: tl.constexpr,  # H / Hkv
    CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(Tq, BLOCK_M)
    rank, head = place(tl.program_id(0), tiles, heads, span)
    row, b, h = (tiles - 1 - rank) * BLOCK_M, head // H, head % H
    keys = Tk if lengths_ptr is None else tl.load(lengths_ptr + b)
    first, end, top, low, high, bottom = limits(row, b, Tq, keys, window, starts_ptr, CAUSAL, BLOCK_M)
    top = top // BLOCK_N * BLOCK_N
    split = tl.program_id(1)
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(bottom - top, BLOCK_N), SPLITS) * BLOCK_N
        top += split * part
        bottom = min(bottom, top + part)
    largest = tl.full((BLOCK_M,), LEAST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    q = load_tile(q_ptr, q_strides, b, h, row, Tq, D, BLOCK_M, BLOCK_D, False)
    for n in range(top, bottom, BLOCK_N):
        k = load_tile(k_ptr, k_strides, b, h // GROUP, n, Tk, D, BLOCK_N, BLOCK_D, TMA)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if n < low or n + BLOCK_N > high:
            key = n + tl.arange(0, BLOCK_N)
            seen = key[None, :] < end[:, None]
            if window is not None or starts_ptr is not None:
                seen &= key[None, :] >= first[:, None]
            s = tl.where(seen, s, -float("inf"))
        before = largest
        largest = tl.maximum(before, tl.max(s, 1) * (scale * LOG2E))
        p = tl.exp2(s * (scale * LOG2E) - largest[:, None])
        shrink = tl.exp2(before - largest)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(v_ptr, v_strides, b, h // GROUP, n, Tk, D, BLOCK_N, BLOCK_D, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    total = tl.where(total > 0, total, 1.0)  # 0: this part of the keys has none for it
    rows = row + tl.arange(0, BLOCK_M)
    numbers = lse_ptr + (split * heads + head).to(tl.int64) * lse_stride
    tl.store(numbers + rows, largest + tl.log2(total), rows < Tq)
    acc *= (1 / total)[:, None]
    out = acc.to(q.dtype) if SPLITS == 1 else acc
    store_tile(out_ptr, out_strides, out, split * (heads // H) + b, h, row, Tq, D, BLOCK_M, BLOCK_D, TMA)


@triton.jit(do_not_specialize=["lse_stride", "heads", "Tq"])
def _combine_kernel(
    parts_ptr,  # (SPLITS, B, Tq, H, D) fp32
    numbers_ptr,  # (SPLITS, B, H, Tq) fp32: lse
    out_ptr,  # (B, Tq, H, D)
    lse_ptr,  # (B, H, Tq) fp32
    lse_stride,
    heads,
    H,
    Tq,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A row's softmax over all keys, from its softmaxes over the parts: their mean, weighted with their sums."""
    row = tl.program_id(0).to(tl.int64)  # of B Tq H
    b, t, h = row // (Tq * H), row // H % Tq, row % H
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    lse = tl.load(numbers_ptr + (split * heads + b * H + h) * lse_stride + t)
    largest = tl.max(lse, 0)
    weight = tl.exp2(lse - largest)
    total = tl.sum(weight, 0)
    at = (split.to(tl.int64) * heads * Tq + row)[:, None] * D + d[None, :]
    parts = tl.load(parts_ptr + at, (d < D)[None, :], other=0.0)
    out = tl.sum(parts * (weight / total)[:, None], 0)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), d < D)
    tl.store(lse_ptr + (b * H + h) * lse_stride + t, largest + tl.log2(total))


def splits(programs: int, keys: int, device: torch.device) -> int:
    """A decoding step has few queries and many keys: into how many parts, a power of two, of at least 256 they go."""
    wanted = min(4 * processors(device) // programs, triton.cdiv(keys, 256))
    return 2 ** max(0, wanted.bit_length() - 1)


@torch.library.custom_op("hotswap::attention_fwd", mutates_args=())
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """out (B, Tq, H, D), and lse (B, H, Tq, rounded up to 16 bytes) fp32: log2 of the sum of exp2(LOG2E scores)."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    B, Tq, H, D = q.shape
    out, lse = outputs(q)
    decode = Tq <= 16
    tma = not decode and by_tma(k, v, out)
    size = launch("decode" if decode else "forward", q.dtype, D, tma, q.device)
    M, N, width = size["BLOCK_M"], size["BLOCK_N"], size["BLOCK_D"]
    programs = triton.cdiv(Tq, M) * B * H
    parts, numbers, count = out, lse, splits(programs, k.shape[1], q.device) if decode else 1
    if count > 1:
        parts, numbers = (t.new_empty(count * B, *t.shape[1:], dtype=torch.float32) for t in (out, lse))
    tensors = q, source(k, N, width, tma), source(v, N, width, tma), source(parts, M, width, tma)
    strides = [t.stride()[:3] for t in (q, k, v, parts)]
    shape = B * H, H, Tq, k.shape[1], span(k)
    fixed = {"D": D, "GROUP": H // k.shape[2], "CAUSAL": causal, "SPLITS": count, "TMA": tma}
    fixed["PRECISION"] = "ieee" if q.dtype == torch.float32 else "tf32"  # of fp32 alone
    _fwd_kernel[(programs, count)](
        *tensors, numbers, starts, lengths, *strides, lse.stride(1), scale, window, *shape, **fixed, **size
    )
    if count > 1:
        _combine_kernel[(B * Tq * H,)](
            parts, numbers, out, lse, lse.stride(1), B * H, H, Tq, D=D, SPLITS=count, BLOCK_D=width, num_warps=1
        )
    return out, lse


def outputs(q):
    """What attention_fwd returns, not yet written."""
    B, Tq, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, (Tq + 3) // 4 * 4, dtype=torch.float32)


attention_fwd.register_fake(lambda q, *_: outputs(q))


@torch.library.custom_op("hotswap::attention_bwd", mutates_args=())
def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    """dq, dk and dv in packed.buffer()."""
    grads = buffer(q, k)
    backward(dout, q, k, v, out, lse, starts, causal, scale, window, *parted(grads, q, k))
    return grads


attention_bwd.register_fake(lambda dout, q, k, *_: buffer(q, k))


def _setup_context(ctx, inputs, output):
    q, k, v, starts, _, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def _backward(ctx, dout, _dlse):
    q, k, *rest = ctx.saved_tensors  # once: under torch.utils.checkpoint a second look is an error
    grads = attention_bwd(dout, q, k, *rest, *ctx.options)
    return *parted(grads, q, k), None, None, None, None, None


attention_bwd = direct(attention_bwd)
attention_fwd = direct(attention_fwd, _backward, _setup_context)


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None):
    check(q, "triton")
    if not causal and (window is not None or starts is not None):
        raise Unavailable("attention=triton has windows and documents in causal attention alone: choose attn=eager")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    starts, lengths = (t if t is None else t.contiguous() for t in (starts, lengths))
    return attention_fwd(q, k, v, starts, lengths, causal, scale, window)[0]


def detail(q, k, v, *, causal=True, starts=None, window=None, **rest) -> str:
    return triton_detail(q=q) + ", Gluon backward" * _gluon_backward.takes(q, k, causal, starts, window)
