"""FlashAttention-2 (Dao 2023, arXiv:2307.08691) in Triton: the scores exist only as tiles, in registers.

Forward. A program takes BLOCK_M queries of one head and walks over the keys, BLOCK_N at a time. For each query it keeps
m, the largest score so far; l, the sum of exp(s - m); and acc, the sum of exp(s - m) v. When a tile has a larger
maximum m', the program first rescales both sums (Milakov and Gimelshein 2018, arXiv:1805.02867):

    l = l exp(m - m') + sum_keys exp(s - m')    acc = acc exp(m - m') + exp(s - m') v    at the end out = acc / l

Backward. The forward saves lse = m + log l, 4 bytes per query and head, besides q, k, v and out. The backward
recomputes p = exp(s - lse) with one matmul. With s = scale q k^T, p = softmax(s), out = p v:

    dv = p^T dout    dp = dout v^T    ds = p (dp - delta)    dq = scale ds k    dk = scale ds^T q

The Jacobian of a softmax is diag(p) - p p^T, so delta is each row's sum of p dp. This sum equals
sum_keys p (dout . v) = dout . out, so the backward computes delta from dout and out, before it has any scores.

FLOPs. A matmul takes 2 Tq Tk D FLOP per head, and half of that if causal. The causal forward has two matmuls and moves
8 T D bytes of q, k, v and out in bf16. That is T / 4 FLOP per byte, 256 at T = 1024. An H200's ridge is at 186, so the
forward is compute-bound. At D = 64 exponentials take as long as matmuls: in a clock a multiprocessor does 4096 FLOP on
tensor cores but only 16 exponentials, and a score costs 256 FLOP and one exponential (Shah et al. 2024,
arXiv:2407.08608). Two programs share a multiprocessor, so that one does matmuls while the other does exponentials. Two
measures keep all other work small: the multiply-add before exp2 includes the factor scale log2(e), and a program masks
only the tiles that an edge of the mask crosses (the diagonal, the beginning of a window or document, the last key).
For causal attention over whole sequences gluon.py does better on Hopper, with warps in different roles.

The backward needs five matmuls. dq is a sum over keys; dk and dv are sums over queries. A loop over keys can keep only
dq in registers, and a loop over queries can keep only dk and dv. So one kernel computes dq, another one computes dk and
dv, and both recompute s and dp: seven matmuls. Every sum has a fixed order, so the result has the same bits each time.
The dq kernel has dout of its queries in registers, so it also reads out and computes delta.

A single kernel with five matmuls has to sum dq in memory, which moves 8 D bytes per query for every tile of keys, and
its programs have to take turns, or the bits would differ each time: see _gluon_backward.py.

q, k and v may be views of one packed tensor, because the kernels read tiles by strides, on Hopper with TMA. Their
gradients are views of one buffer in the same order, so that autograd does not have to concatenate them (packed.py).

A decoding step has one query per head and reads all keys, so it is memory-bound. With 12 heads, one program per head
would keep 12 of 132 multiprocessors busy. So several programs each take a part of the keys, and a second kernel
combines the results of the parts.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.attention._triton_backward import attention_bwd
from kernels.attention._triton_tiles import (
    LOG2E,
    can_use_tma,
    candidates,  # noqa: F401
    empty_outputs,
    heads_in_l2,
    kernel_argument,
    load_tile,
    store_tile,
    tile_and_head,
    tile_parameters,
    visible_keys,
)
from kernels.direct import custom_op
from kernels.gpu import check_dtypes, multiprocessors
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.packed import gradient_views
from kernels.registry import Unavailable

LOWEST = tl.constexpr(-1e30)  # below every score, but finite, because -inf - -inf would be NaN
MAX_HEAD_DIM = 256  # a program keeps sums over all channels of a head in registers
KEEPS = ("hotswap::attention_fwd",)
FP8_KEYS = True
RUNS = "^_fwd_kernel|::attention_fwd", "^_dq_kernel|::attention_bwd"
FAMILY = "^_(fwd|dq|dkdv|combine)_k"


@triton.jit(do_not_specialize=["heads", "Tq", "Tk", "lse_stride", "window", "active_heads"])
def _fwd_kernel(
    q_ptr,  # (B, Tq, H, D)
    k_ptr,  # (B, Tk, Hkv, D); v has the same shape
    v_ptr,
    out_ptr,  # (SPLITS B, Tq, H, D)
    lse_ptr,  # (SPLITS B H, Tq) fp32
    starts_ptr,  # (B, Tq) int32, or None
    lengths_ptr,  # (B,) int32, or None
    q_strides,  # (from one sequence to the next, from one token to the next, from one head to the next)
    k_strides,
    v_strides,
    out_strides,
    lse_stride,  # from one head to the next
    scale,
    window,
    heads,  # B H: the heads of all sequences
    H,
    Tq,
    Tk,
    active_heads,  # see tile_and_head()
    D: tl.constexpr,
    GROUP: tl.constexpr,  # H / Hkv
    CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,  # parts of the keys, each for another program
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(Tq, BLOCK_M)
    rank, head = tile_and_head(tl.program_id(0), tiles, heads, active_heads)
    m, b, h = (tiles - 1 - rank) * BLOCK_M, head // H, head % H
    keys = Tk if lengths_ptr is None else tl.load(lengths_ptr + b)
    first, end, any_start, all_start, all_end, any_end = visible_keys(
        m, b, Tq, keys, window, starts_ptr, CAUSAL, BLOCK_M
    )
    any_start = any_start // BLOCK_N * BLOCK_N
    split = tl.program_id(1)
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(any_end - any_start, BLOCK_N), SPLITS) * BLOCK_N
        any_start += split * part
        any_end = min(any_end, any_start + part)
    largest = tl.full((BLOCK_M,), LOWEST, tl.float32)  # m of the docstring, times log2(e)
    total = tl.zeros((BLOCK_M,), tl.float32)  # l of the docstring
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    q = load_tile(q_ptr, q_strides, b, h, m, Tq, D, BLOCK_M, BLOCK_D, False)
    for n in range(any_start, any_end, BLOCK_N):
        k = load_tile(k_ptr, k_strides, b, h // GROUP, n, Tk, D, BLOCK_N, BLOCK_D, TMA)
        s = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION)
        if n < all_start or n + BLOCK_N > all_end:
            key = n + tl.arange(0, BLOCK_N)
            visible = key[None, :] < end[:, None]
            if window is not None or starts_ptr is not None:
                visible &= key[None, :] >= first[:, None]
            s = tl.where(visible, s, -float("inf"))
        before = largest
        largest = tl.maximum(before, tl.max(s, 1) * (scale * LOG2E))
        p = tl.exp2(s * (scale * LOG2E) - largest[:, None])
        shrink = tl.exp2(before - largest)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(v_ptr, v_strides, b, h // GROUP, n, Tk, D, BLOCK_N, BLOCK_D, TMA)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
    total = tl.where(total > 0, total, 1.0)  # it is 0 if the query sees no key in this part
    query = m + tl.arange(0, BLOCK_M)
    lse_ptr += (split * heads + head).to(tl.int64) * lse_stride
    tl.store(lse_ptr + query, largest + tl.log2(total), query < Tq)
    acc *= (1 / total)[:, None]
    out = acc.to(q.dtype) if SPLITS == 1 else acc
    store_tile(out_ptr, out_strides, out, split * (heads // H) + b, h, m, Tq, D, BLOCK_M, BLOCK_D, TMA)


@triton.jit(do_not_specialize=["lse_stride", "heads", "Tq"])
def _combine_kernel(
    part_out_ptr,  # (SPLITS, B, Tq, H, D) fp32
    part_lse_ptr,  # (SPLITS, B, H, Tq) fp32
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
    """Combine the results of the parts: out is the mean of the parts' outs, weighted by exp2 of their lse."""
    row = tl.program_id(0).to(tl.int64)  # of out as (B Tq H, D)
    b, t, h = row // (Tq * H), row // H % Tq, row % H
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    lse = tl.load(part_lse_ptr + (split.to(tl.int64) * heads + b * H + h) * lse_stride + t)
    largest = tl.max(lse, 0)
    weight = tl.exp2(lse - largest)
    total = tl.sum(weight, 0)
    offsets = (split.to(tl.int64) * heads * Tq + row)[:, None] * D + d[None, :]
    part_out = tl.load(part_out_ptr + offsets, (d < D)[None, :], other=0.0)
    out = tl.sum(part_out * (weight / total)[:, None], 0)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), d < D)
    tl.store(lse_ptr + (b * H + h) * lse_stride + t, largest + tl.log2(total))


def count_splits(programs: int, keys: int, device: torch.device) -> int:
    """Return the number of parts into which a decoding step splits its keys: a power of two.

    `programs` is the number of programs without splitting. With splitting there are up to 4 per multiprocessor, and
    each part has about 256 keys or more.
    """
    limit = min(4 * multiprocessors(device) // programs, triton.cdiv(keys, 256))
    return 2 ** max(0, limit.bit_length() - 1)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """q (B, Tq, H, D), k and v (B, Tk, Hkv, D) -> out (B, Tq, H, D), lse (B, H, Tq rounded up to a multiple of 4) fp32.

    lse is log2 of the sum of exp(score) over the keys of a query. Its rows are multiples of 16 bytes, as TMA requires.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    B, Tq, H, D = q.shape
    window = None if window is None else min(window, k.shape[1])  # sums with 2^31 - 1 would wrap around
    out, lse = empty_outputs(q)
    decode = Tq <= 16
    tma = not decode and k.dtype == q.dtype and can_use_tma(k, v, out)
    parameters = tile_parameters("decode" if decode else "forward", q.dtype, D, tma, q.device)
    M, N, width = parameters["BLOCK_M"], parameters["BLOCK_N"], parameters["BLOCK_D"]
    programs = triton.cdiv(Tq, M) * B * H
    splits = count_splits(programs, k.shape[1], q.device) if decode else 1
    part_out, part_lse = out, lse
    if splits > 1:
        part_out = out.new_empty(splits * B, *out.shape[1:], dtype=torch.float32)
        part_lse = lse.new_empty(splits * B, *lse.shape[1:])
    _fwd_kernel[(programs, splits)](
        q_ptr=q,
        k_ptr=kernel_argument(k, N, width, tma),
        v_ptr=kernel_argument(v, N, width, tma),
        out_ptr=kernel_argument(part_out, M, width, tma),
        lse_ptr=part_lse,
        starts_ptr=starts,
        lengths_ptr=lengths,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        v_strides=v.stride()[:3],
        out_strides=part_out.stride()[:3],
        lse_stride=lse.stride(1),
        scale=scale,
        window=window,
        heads=B * H,
        H=H,
        Tq=Tq,
        Tk=k.shape[1],
        active_heads=heads_in_l2(k),
        D=D,
        GROUP=H // k.shape[2],
        CAUSAL=causal,
        SPLITS=splits,
        TMA=tma,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # only fp32 matmuls use it
        **parameters,
    )
    if splits > 1:
        _combine_kernel[(B * Tq * H,)](
            part_out_ptr=part_out,
            part_lse_ptr=part_lse,
            out_ptr=out,
            lse_ptr=lse,
            lse_stride=lse.stride(1),
            heads=B * H,
            H=H,
            Tq=Tq,
            D=D,
            SPLITS=splits,
            BLOCK_D=width,
            num_warps=1,
        )
    return out, lse


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, lengths, ctx.causal, ctx.scale, ctx.window = inputs
    ctx.has_lengths = lengths is not None
    ctx.save_for_backward(q, k, v, *output, starts)


def _backward(ctx: FunctionCtx, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, starts = ctx.saved_tensors  # read once: torch.utils.checkpoint raises on a second read
    options = {"causal": ctx.causal, "scale": ctx.scale, "window": ctx.window, "has_lengths": ctx.has_lengths}
    grads = attention_bwd(dout, q, k, v, out=out, lse=lse, starts=starts, **options)
    return *gradient_views(grads, q, k), None, None, None, None, None


attention_fwd = custom_op("hotswap::attention_fwd", launch_forward, empty_outputs, _backward, _setup_context)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    check_dtypes("attention", q)
    if (D := q.shape[-1]) > MAX_HEAD_DIM:
        raise Unavailable(f"attention=triton takes heads of up to {MAX_HEAD_DIM} channels, not {D}: choose attn=sdpa")
    if not causal and (window is not None or starts is not None):
        raise Unavailable("attention=triton supports windows and documents only in causal attention: choose attn=eager")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return attention_fwd(q, k, v, starts, lengths, causal, scale, window)[0]
