"""The backward of triton.py, whose docstring derives it: a kernel for dQ, one for dK and dV; or _gluon_backward's."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention import _gluon_backward
from kernels.attention._triton_tiles import LOG2E, by_tma, launch, limits, load_tile, place, source, span, store_tile


@triton.jit
def load_numbers(source, head, row, rows, stride, SIZE: tl.constexpr, TMA: tl.constexpr):
    """(SIZE,): one number a query, of lse or delta, zero beyond the last.

    By TMA as well: a load of 64 numbers by 128 threads is laid out as the registers of the product that wants them,
    each number in 8 threads, and copied so: 31 copies, 116 comparisons and 721 instructions a step instead of 356.
    """
    if TMA:
        numbers = source.load([head, row]).reshape(SIZE)
    else:
        at = row + tl.arange(0, SIZE)
        numbers = tl.load(source + head.to(tl.int64) * stride + at, at < rows, other=0.0)
    return numbers


@triton.jit(do_not_specialize=["heads", "Tq", "Tk", "numbers_stride", "window", "span"])
def _dq_kernel(
    q_ptr,  # (B, Tq, H, D), and so are out, dout and dq
    k_ptr,  # (B, Tk, Hkv, D), and so is v
    v_ptr,
    out_ptr,
    dout_ptr,
    dq_ptr,
    lse_ptr,  # (B H, Tq) fp32
    delta_ptr,  # (B H, Tq) fp32, written here
    starts_ptr,  # (B, Tq) int32, or None
    q_strides,  # between sequences, tokens, heads
    k_strides,
    v_strides,
    out_strides,  # also dout's
    dq_strides,
    numbers_stride,  # between the heads of lse and delta
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
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(Tq, BLOCK_M)
    rank, head = place(tl.program_id(0), tiles, heads, span)
    row, b, h = (tiles - 1 - rank) * BLOCK_M, head // H, head % H
    first, end, top, low, high, bottom = limits(row, b, Tq, Tk, window, starts_ptr, CAUSAL, BLOCK_M)
    q = load_tile(q_ptr, q_strides, b, h, row, Tq, D, BLOCK_M, BLOCK_D, False)
    dout = load_tile(dout_ptr, out_strides, b, h, row, Tq, D, BLOCK_M, BLOCK_D, False)
    out = load_tile(out_ptr, out_strides, b, h, row, Tq, D, BLOCK_M, BLOCK_D, False)
    rows = row + tl.arange(0, BLOCK_M)
    at = head.to(tl.int64) * numbers_stride + rows
    lse = tl.load(lse_ptr + at, rows < Tq, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + at, delta, rows < Tq)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in range(top // BLOCK_N * BLOCK_N, bottom, BLOCK_N):
        k = load_tile(k_ptr, k_strides, b, h // GROUP, n, Tk, D, BLOCK_N, BLOCK_D, TMA)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if n < low or n + BLOCK_N > high:
            key = n + tl.arange(0, BLOCK_N)
            seen = key[None, :] < end[:, None]
            if window is not None or starts_ptr is not None:
                seen &= key[None, :] >= first[:, None]
            s = tl.where(seen, s, -float("inf"))
        p = tl.exp2(s * (scale * LOG2E) - lse[:, None])
        v = load_tile(v_ptr, v_strides, b, h // GROUP, n, Tk, D, BLOCK_N, BLOCK_D, TMA)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq = (dq * scale).to(q.dtype)
    store_tile(dq_ptr, dq_strides, dq, b, h, row, Tq, D, BLOCK_M, BLOCK_D, TMA)


@triton.jit(do_not_specialize=["heads", "Tq", "Tk", "numbers_stride", "window", "span"])
def _dkdv_kernel(
    q_ptr,  # (B, Tq, H, D), and so is dout
    k_ptr,  # (B, Tk, Hkv, D), and so are v, dk and dv
    v_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    lse_ptr,  # (B H, Tq) fp32
    delta_ptr,
    ends_ptr,  # (B, Tk) int32, or None: the end of the queries that see each key
    q_strides,  # between sequences, tokens, heads
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,  # also dv's
    numbers_stride,
    scale,
    window,
    heads,  # B Hkv
    Hkv,
    Tq,
    Tk,
    span,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rank, head = place(tl.program_id(0), tl.cdiv(Tk, BLOCK_N), heads, span)
    key, b = rank * BLOCK_N, head // Hkv
    keys = key + tl.arange(0, BLOCK_N)
    since, until = keys + (Tq - Tk), tl.full((BLOCK_N,), Tq, tl.int32)  # the queries that see each
    top, whole, low, bottom = 0, 0, Tq + BLOCK_M, Tq
    if CAUSAL:
        top, whole = max(key + Tq - Tk, 0), key + Tq - Tk + BLOCK_N - 1
    if window is not None:
        until, low, bottom = since + window, key + Tq - Tk + window, min(Tq, whole + window)
    if ends_ptr is not None:
        ends_ptr += b.to(tl.int64) * Tk
        until = tl.minimum(until, tl.load(ends_ptr + keys, keys < Tk, other=0))
        low = min(low, tl.load(ends_ptr + key))
        bottom = min(bottom, tl.load(ends_ptr + min(key + BLOCK_N, Tk) - 1))
    k = load_tile(k_ptr, k_strides, b, head % Hkv, key, Tk, D, BLOCK_N, BLOCK_D, False)
    v = load_tile(v_ptr, v_strides, b, head % Hkv, key, Tk, D, BLOCK_N, BLOCK_D, False)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(GROUP):  # the query heads that share these keys
        h = head % Hkv * GROUP + member
        for m in range(top // BLOCK_M * BLOCK_M, bottom, BLOCK_M):
            # transposed, keys down and queries across: so p and ds are first factors of the products that follow, which
            # may stay in registers
            q = load_tile(q_ptr, q_strides, b, h, m, Tq, D, BLOCK_M, BLOCK_D, TMA)
            lse = load_numbers(lse_ptr, b * Hkv * GROUP + h, m, Tq, numbers_stride, BLOCK_M, TMA)
            if (
                PRECISION == "ieee"
            ):  # rounded as in the forward, or p does not add up to 1: products may differ transposed
                s = tl.dot(q, k.T, input_precision=PRECISION).T
            else:
                s = tl.dot(k, q.T, input_precision=PRECISION)
            if m < whole or m + BLOCK_M > low:
                row = m + tl.arange(0, BLOCK_M)
                seen = since[:, None] <= row[None, :]
                if window is not None or ends_ptr is not None:
                    seen &= row[None, :] < until[:, None]
                s = tl.where(seen, s, -float("inf"))
            p = tl.exp2(s * (scale * LOG2E) - lse[None, :])
            dout = load_tile(dout_ptr, dout_strides, b, h, m, Tq, D, BLOCK_M, BLOCK_D, TMA)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            delta = load_numbers(delta_ptr, b * Hkv * GROUP + h, m, Tq, numbers_stride, BLOCK_M, TMA)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    dk, dv = (dk * scale).to(k.dtype), dv.to(k.dtype)
    store_tile(dk_ptr, dk_strides, dk, b, head % Hkv, key, Tk, D, BLOCK_N, BLOCK_D, TMA)
    store_tile(dv_ptr, dk_strides, dv, b, head % Hkv, key, Tk, D, BLOCK_N, BLOCK_D, TMA)


def backward(dout, q, k, v, out, lse, starts, causal, scale, window, dq, dk, dv) -> None:
    """Writes dq, dk and dv, views of any strides."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    dout, out = dout.contiguous(), out.contiguous()
    tma = by_tma(q, k, v, dout, dq, dk, dv)
    if tma and _gluon_backward.takes(q, k, causal, starts, window):
        _gluon_backward.backward(dout, q, k, v, out, lse, scale, dq, dk, dv)
        return
    (B, Tq, H, D), (_, Tk, Hkv, _) = q.shape, k.shape
    delta, ends = torch.empty_like(lse), None
    if starts is not None:
        keys = torch.arange(Tk, dtype=starts.dtype, device=starts.device).repeat(B, 1)
        ends = torch.searchsorted(starts, keys, right=True, out_int32=True)
    fixed = {"D": D, "GROUP": H // Hkv, "CAUSAL": causal, "TMA": tma}
    fixed["PRECISION"] = "ieee" if q.dtype == torch.float32 else "tf32"  # of fp32 alone
    strides = [t.stride()[:3] for t in (q, k, v, out)]
    numbers = lse.stride(1), scale, window

    size = launch("dq", q.dtype, D, tma, q.device)
    M, N, width = size["BLOCK_M"], size["BLOCK_N"], size["BLOCK_D"]
    tensors = q, source(k, N, width, tma), source(v, N, width, tma), out, dout, source(dq, M, width, tma)
    shape = B * H, H, Tq, Tk, span(k)
    _dq_kernel[(triton.cdiv(Tq, M) * B * H,)](
        *tensors, lse, delta, starts, *strides, dq.stride()[:3], *numbers, *shape, **fixed, **size
    )

    size = launch("dkdv", q.dtype, D, tma, q.device)
    M, N = size["BLOCK_M"], size["BLOCK_N"]
    tensors = source(q, M, width, tma), k, v, *(source(*t, width, tma) for t in ((dout, M), (dk, N), (dv, N)))
    shape = B * Hkv, Hkv, Tq, Tk, span(q)
    if tma:
        lse, delta = (TensorDescriptor(t, [B * H, Tq], [t.stride(1), 1], [1, M]) for t in (lse, delta))
    _dkdv_kernel[(triton.cdiv(Tk, N) * B * Hkv,)](
        *tensors, lse, delta, ends, *strides, dk.stride()[:3], *numbers, *shape, **fixed, **size
    )
