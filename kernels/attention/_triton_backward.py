"""The backward of triton.py, whose docstring derives it: one kernel computes dq, another one dk and dv."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention._triton_tiles import (
    LOG2E,
    can_use_tma,
    heads_in_l2,
    kernel_argument,
    load_tile,
    store_tile,
    tile_and_head,
    tile_parameters,
    visible_keys,
)
from kernels.direct import custom_op
from kernels.gpu import is_hopper
from kernels.packed import gradient_buffer, gradient_views
from kernels.registry import Unavailable


@triton.jit
def load_vector(source, head, m, Tq, stride, SIZE: tl.constexpr, TMA: tl.constexpr):
    """Return lse or delta of the SIZE queries m, m + 1, ... (SIZE,), zero beyond the last query.

    With TMA, a step of the loop over queries has 356 instructions. Without TMA it has 721, with 31 copies and 116
    comparisons, because Triton copies the numbers in the register layout of the matmul that uses them. In this layout
    8 of the 128 threads hold each of the 64 numbers.
    """
    if TMA:
        vector = source.load([head, m]).reshape(SIZE)
    else:
        query = m + tl.arange(0, SIZE)
        vector = tl.load(source + head.to(tl.int64) * stride + query, query < Tq, other=0.0)
    return vector


@triton.jit
def to_registers(tile):
    """Return the tile times the identity, which is the tile. As the result of a matmul, it stays in registers.

    Triton puts a loaded tile that is the first factor of a matmul in shared memory. Without q and dout there, two
    programs with three stages of k and v share a multiprocessor, 96 KB each. The dq kernel then takes 0.649 ms instead
    of 0.754 at (4, 4096, 16, 128) on an H200. At D = 64 it gains nothing.
    """
    i = tl.arange(0, tile.shape[1])
    return tl.dot(tile, (i[:, None] == i[None, :]).to(tile.dtype)).to(tile.dtype)


@triton.jit(do_not_specialize=["heads", "Tq", "Tk", "lse_stride", "window", "active_heads"])
def _dq_kernel(
    q_ptr,  # (B, Tq, H, D); out, dout and dq have the same shape
    k_ptr,  # (B, Tk, Hkv, D); v has the same shape
    v_ptr,
    out_ptr,
    dout_ptr,
    dq_ptr,
    lse_ptr,  # (B H, Tq) fp32
    delta_ptr,  # (B H, Tq) fp32; this kernel writes it
    starts_ptr,  # (B, Tq) int32, or None
    q_strides,  # (from one sequence to the next, from one token to the next, from one head to the next)
    k_strides,
    v_strides,
    out_strides,  # dout has the same strides
    dq_strides,
    lse_stride,  # from one head to the next; delta has the same stride
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
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    REGISTERS: tl.constexpr,  # q and dout stay in registers
):
    tiles = tl.cdiv(Tq, BLOCK_M)
    rank, head = tile_and_head(tl.program_id(0), tiles, heads, active_heads)
    m, b, h = (tiles - 1 - rank) * BLOCK_M, head // H, head % H
    first, end, any_start, all_start, all_end, any_end = visible_keys(m, b, Tq, Tk, window, starts_ptr, CAUSAL, BLOCK_M)
    q = load_tile(q_ptr, q_strides, b, h, m, Tq, D, BLOCK_M, BLOCK_D, False)
    dout = load_tile(dout_ptr, out_strides, b, h, m, Tq, D, BLOCK_M, BLOCK_D, False)
    out = load_tile(out_ptr, out_strides, b, h, m, Tq, D, BLOCK_M, BLOCK_D, False)
    if REGISTERS:
        q, dout = to_registers(q), to_registers(dout)
    query = m + tl.arange(0, BLOCK_M)
    offsets = head.to(tl.int64) * lse_stride + query
    lse = tl.load(lse_ptr + offsets, query < Tq, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + offsets, delta, query < Tq)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in range(any_start // BLOCK_N * BLOCK_N, any_end, BLOCK_N):
        k = load_tile(k_ptr, k_strides, b, h // GROUP, n, Tk, D, BLOCK_N, BLOCK_D, TMA)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if n < all_start or n + BLOCK_N > all_end:
            key = n + tl.arange(0, BLOCK_N)
            visible = key[None, :] < end[:, None]
            if window is not None or starts_ptr is not None:
                visible &= key[None, :] >= first[:, None]
            s = tl.where(visible, s, -float("inf"))
        p = tl.exp2(s * (scale * LOG2E) - lse[:, None])
        v = load_tile(v_ptr, v_strides, b, h // GROUP, n, Tk, D, BLOCK_N, BLOCK_D, TMA)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq = (dq * scale).to(q.dtype)
    store_tile(dq_ptr, dq_strides, dq, b, h, m, Tq, D, BLOCK_M, BLOCK_D, TMA)


@triton.jit(do_not_specialize=["heads", "Tq", "Tk", "lse_stride", "window", "active_heads"])
def _dkdv_kernel(
    q_ptr,  # (B, Tq, H, D); dout has the same shape
    k_ptr,  # (B, Tk, Hkv, D); v, dk and dv have the same shape
    v_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    lse_ptr,  # (B H, Tq) fp32
    delta_ptr,  # (B H, Tq) fp32
    ends_ptr,  # (B, Tk) int32, or None; only the queries before ends[b, j] see key j
    q_strides,  # (from one sequence to the next, from one token to the next, from one head to the next)
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,  # dv has the same strides
    lse_stride,  # from one head to the next; delta has the same stride
    scale,
    window,
    heads,  # B Hkv: the key heads of all sequences
    Hkv,
    Tq,
    Tk,
    active_heads,  # see tile_and_head()
    D: tl.constexpr,
    GROUP: tl.constexpr,  # H / Hkv
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rank, head = tile_and_head(tl.program_id(0), tl.cdiv(Tk, BLOCK_N), heads, active_heads)
    n, b = rank * BLOCK_N, head // Hkv
    key = n + tl.arange(0, BLOCK_N)
    # The queries from `first` to before `end` see a key. No query before any_start or from any_end on sees a key of the
    # block. The queries from all_start to before all_end see all keys of the block. Without a window and documents,
    # all_end is so large that the last tile gets no mask: beyond the last query p is 1, but dout and ds are 0. Without
    # CAUSAL no tile gets a mask, so `first` and `end` are not used
    first, end = key + (Tq - Tk), tl.full((BLOCK_N,), Tq, tl.int32)
    any_start, all_start, all_end, any_end = 0, 0, Tq + BLOCK_M, Tq
    if CAUSAL:
        any_start, all_start = max(n + Tq - Tk, 0), n + Tq - Tk + BLOCK_N - 1
    if window is not None:
        end, all_end, any_end = first + window, n + Tq - Tk + window, min(Tq, all_start + window)
    if ends_ptr is not None:
        ends_ptr += b.to(tl.int64) * Tk
        end = tl.minimum(end, tl.load(ends_ptr + key, key < Tk, other=0))
        all_end = min(all_end, tl.load(ends_ptr + n))
        any_end = min(any_end, tl.load(ends_ptr + min(n + BLOCK_N, Tk) - 1))
    k = load_tile(k_ptr, k_strides, b, head % Hkv, n, Tk, D, BLOCK_N, BLOCK_D, False)
    v = load_tile(v_ptr, v_strides, b, head % Hkv, n, Tk, D, BLOCK_N, BLOCK_D, False)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(GROUP):  # the query heads that share these keys
        h = head % Hkv * GROUP + member
        for m in range(any_start // BLOCK_M * BLOCK_M, any_end, BLOCK_M):
            # s, p, dp and ds are transposed: a row for each key, a column for each query. So p and ds are first factors
            # of the matmuls that follow, and first factors may stay in registers
            q = load_tile(q_ptr, q_strides, b, h, m, Tq, D, BLOCK_M, BLOCK_D, TMA)
            lse = load_vector(lse_ptr, b * Hkv * GROUP + h, m, Tq, lse_stride, BLOCK_M, TMA)
            # In fp32 a transposed matmul may round differently. s must round as in the forward, or p does not sum to 1
            if PRECISION == "ieee":
                s = tl.dot(q, k.T, input_precision=PRECISION).T
            else:
                s = tl.dot(k, q.T, input_precision=PRECISION)
            if m < all_start or m + BLOCK_M > all_end:
                query = m + tl.arange(0, BLOCK_M)
                visible = first[:, None] <= query[None, :]
                if window is not None or ends_ptr is not None:
                    visible &= query[None, :] < end[:, None]
                s = tl.where(visible, s, -float("inf"))
            p = tl.exp2(s * (scale * LOG2E) - lse[None, :])
            dout = load_tile(dout_ptr, dout_strides, b, h, m, Tq, D, BLOCK_M, BLOCK_D, TMA)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            delta = load_vector(delta_ptr, b * Hkv * GROUP + h, m, Tq, lse_stride, BLOCK_M, TMA)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    dk, dv = (dk * scale).to(k.dtype), dv.to(k.dtype)
    store_tile(dk_ptr, dk_strides, dk, b, head % Hkv, n, Tk, D, BLOCK_N, BLOCK_D, TMA)
    store_tile(dv_ptr, dk_strides, dv, b, head % Hkv, n, Tk, D, BLOCK_N, BLOCK_D, TMA)


def launch_backward(
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
    has_lengths: bool = False,
) -> Tensor:
    """Return dq, dk and dv in one tensor, as packed.gradient_buffer() allocates it. out and lse are the forward's.

    Raises Unavailable if the forward had lengths: only here is it certain that the caller asks for gradients.
    """
    if has_lengths:
        raise Unavailable("attention=triton has no gradients with lengths: choose attn=sdpa")
    grads = gradient_buffer(q, k)
    dq, dk, dv = gradient_views(grads, q, k)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    dout, out = dout.contiguous(), out.contiguous()
    tma = can_use_tma(q, k, v, dout, dq, dk, dv)
    B, Tq, H, D = q.shape
    Tk, Hkv = k.shape[1:3]
    window = None if window is None else min(window, Tk)  # as in the forward
    delta, ends = torch.empty_like(lse), None
    if starts is not None:  # query t sees key j only if starts[t] <= j; starts never decreases
        keys = torch.arange(Tk, dtype=starts.dtype, device=starts.device).repeat(B, 1)
        ends = torch.searchsorted(starts, keys, right=True, out_int32=True)
    constants = {"D": D, "GROUP": H // Hkv, "CAUSAL": causal, "TMA": tma}
    constants["PRECISION"] = "ieee" if q.dtype == torch.float32 else "tf32"  # only fp32 matmuls use it
    strides = {f"{name}_strides": tensor.stride()[:3] for name, tensor in (("q", q), ("k", k), ("v", v))}
    sizes = {"lse_stride": lse.stride(1), "scale": scale, "window": window, "Tq": Tq, "Tk": Tk}

    parameters = tile_parameters("dq", q.dtype, D, tma, q.device)
    M, N, width = parameters["BLOCK_M"], parameters["BLOCK_N"], parameters["BLOCK_D"]
    _dq_kernel[(triton.cdiv(Tq, M) * B * H,)](
        q_ptr=q,
        k_ptr=kernel_argument(k, N, width, tma),
        v_ptr=kernel_argument(v, N, width, tma),
        out_ptr=out,
        dout_ptr=dout,
        dq_ptr=kernel_argument(dq, M, width, tma),
        lse_ptr=lse,
        delta_ptr=delta,
        starts_ptr=starts,
        out_strides=out.stride()[:3],  # also those of dout: both are contiguous
        dq_strides=dq.stride()[:3],
        heads=B * H,
        H=H,
        active_heads=heads_in_l2(k),
        **strides,
        **sizes,
        **constants,
        **parameters,
        REGISTERS=width == 128 and tma and is_hopper(q.device),  # not timed on another GPU with TMA
    )

    parameters = tile_parameters("dkdv", q.dtype, D, tma, q.device)
    M, N = parameters["BLOCK_M"], parameters["BLOCK_N"]
    if tma:
        lse, delta = (TensorDescriptor(t, [B * H, Tq], [sizes["lse_stride"], 1], [1, M]) for t in (lse, delta))
    _dkdv_kernel[(triton.cdiv(Tk, N) * B * Hkv,)](
        q_ptr=kernel_argument(q, M, width, tma),
        k_ptr=k,
        v_ptr=v,
        dout_ptr=kernel_argument(dout, M, width, tma),
        dk_ptr=kernel_argument(dk, N, width, tma),
        dv_ptr=kernel_argument(dv, N, width, tma),
        lse_ptr=lse,
        delta_ptr=delta,
        ends_ptr=ends,
        dout_strides=out.stride()[:3],
        dk_strides=dk.stride()[:3],  # dv has the same
        heads=B * Hkv,
        Hkv=Hkv,
        active_heads=heads_in_l2(q),
        **strides,
        **sizes,
        **constants,
        **parameters,
    )
    return grads


attention_bwd = custom_op("hotswap::attention_bwd", launch_backward, lambda dout, q, k, *_: gradient_buffer(q, k))
