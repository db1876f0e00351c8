"""A first step towards triton.py: one kernel computes scores and softmax, but still writes p to memory.

p is the (B, H, Tq, Tk) tensor of probabilities. Eager PyTorch makes eight passes over B H Tq Tk numbers. It writes the
scores, reads and writes them three times (to scale, to mask and to normalise), and reads p for the matmul with v.

Here a program takes BLOCK_M rows and sweeps over their keys twice, because a softmax needs its whole row before it can
write any of it. The first sweep keeps each row's running maximum and sum in registers. The second sweep recomputes the
scores and writes p. That is one matmul more and six passes fewer. The backward of the softmax,
ds = p (dp - sum_keys p dp), also takes two sweeps.

triton.py removes the two passes that remain: here the kernel writes p, and the matmul p v reads p. Autograd also saves
p for the backward, whose dp and ds are as large as p. At B = 2, T = 16,384 and 12 heads p takes 12.9 GB in bf16. The
two passes over p take 6.2 ms at an H200's copy rate of 4.18 TB/s; a causal forward's two matmuls take 1.1 ms at 777
TFLOP/s. At T = 1024 and B = 32 p takes 0.8 GB.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.attention._triton_tiles import LOG2E, check_inputs, load_tile
from kernels.direct import bypass_dispatcher
from kernels.gpu import triton_and_cublas_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401

RUNS = ("probabilities",)
FAMILY = "probabilities"


@triton.jit
def _scores(
    q,
    k_ptr,
    k_strides,
    b,
    h,
    n,
    end,
    scale,
    Tk,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return LOG2E times the scores (BLOCK_M, BLOCK_N) of the keys from n on; -inf if a row does not see a key."""
    k = load_tile(k_ptr, k_strides, b, h, n, Tk, D, BLOCK_N, BLOCK_D, False)
    s = tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E)
    return tl.where((n + tl.arange(0, BLOCK_N))[None, :] < end[:, None], s, -float("inf"))


@triton.jit
def _probabilities_kernel(
    q_ptr,  # (B, Tq, H, D)
    k_ptr,  # (B, Tk, Hkv, D)
    p_ptr,  # (B, H, Tq, Tk)
    q_strides,
    k_strides,
    scale,
    H,
    Tq,
    Tk,
    D: tl.constexpr,
    GROUP: tl.constexpr,  # H / Hkv
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(Tq, BLOCK_M)
    row, head = tl.program_id(0) % tiles * BLOCK_M, tl.program_id(0) // tiles
    b, h = head // H, head % H
    rows = row + tl.arange(0, BLOCK_M)
    end = rows + Tk - Tq + 1 if CAUSAL else tl.zeros_like(rows) + Tk  # a row sees the keys before its `end`
    q = load_tile(q_ptr, q_strides, b, h, row, Tq, D, BLOCK_M, BLOCK_D, False)
    largest = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for n in range(0, Tk, BLOCK_N):
        s = _scores(q, k_ptr, k_strides, b, h // GROUP, n, end, scale, Tk, D, BLOCK_N, BLOCK_D, PRECISION)
        before = largest
        largest = tl.maximum(before, tl.max(s, 1))
        total = total * tl.exp2(before - largest) + tl.sum(tl.exp2(s - largest[:, None]), 1)
    p_ptr += (head.to(tl.int64) * Tq + rows)[:, None] * Tk
    for n in range(0, Tk, BLOCK_N):
        s = _scores(q, k_ptr, k_strides, b, h // GROUP, n, end, scale, Tk, D, BLOCK_N, BLOCK_D, PRECISION)
        p = (tl.exp2(s - largest[:, None]) / total[:, None]).to(p_ptr.dtype.element_ty)
        keys = n + tl.arange(0, BLOCK_N)
        tl.store(p_ptr + keys[None, :], p, (rows < Tq)[:, None] & (keys < Tk)[None, :])


@triton.jit
def _softmax_bwd_kernel(p_ptr, dp_ptr, ds_ptr, scale, N, Tk, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ds = p (dp - sum_keys p dp) scale for ROWS of the N rows. A row has Tk keys."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    delta = tl.zeros((ROWS,), tl.float32)
    for n in range(0, Tk, BLOCK):
        keys = n + tl.arange(0, BLOCK)
        offsets = rows[:, None] * Tk + keys[None, :]
        in_bounds = (rows < N)[:, None] & (keys < Tk)[None, :]
        p = tl.load(p_ptr + offsets, in_bounds, other=0.0)
        dp = tl.load(dp_ptr + offsets, in_bounds, other=0.0)
        delta += tl.sum(p.to(tl.float32) * dp.to(tl.float32), 1)
    for n in range(0, Tk, BLOCK):
        keys = n + tl.arange(0, BLOCK)
        offsets = rows[:, None] * Tk + keys[None, :]
        in_bounds = (rows < N)[:, None] & (keys < Tk)[None, :]
        p = tl.load(p_ptr + offsets, in_bounds, other=0.0)
        dp = tl.load(dp_ptr + offsets, in_bounds, other=0.0)
        ds = p.to(tl.float32) * (dp.to(tl.float32) - delta[:, None]) * scale
        tl.store(ds_ptr + offsets, ds.to(ds_ptr.dtype.element_ty), in_bounds)


@torch.library.custom_op("hotswap::attention_probabilities", mutates_args=())
def probabilities(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """q (B, Tq, H, D), k (B, Tk, Hkv, D) -> p = softmax(q k^T scale) (B, H, Tq, Tk), in q's dtype."""
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    B, Tq, H, D = q.shape
    Tk, Hkv = k.shape[1:3]
    p = empty_probabilities(q, k)
    width = max(16, triton.next_power_of_2(D))
    _probabilities_kernel[(triton.cdiv(Tq, 64) * B * H,)](
        q_ptr=q,
        k_ptr=k,
        p_ptr=p,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        scale=scale,
        H=H,
        Tq=Tq,
        Tk=Tk,
        D=D,
        GROUP=H // Hkv,
        CAUSAL=causal,
        BLOCK_M=64,
        BLOCK_N=64 if width <= 128 else 32,
        BLOCK_D=width,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # only fp32 matmuls use it
        num_stages=2,
    )
    return p


@probabilities.register_fake
def empty_probabilities(q: Tensor, k: Tensor, *_: object) -> Tensor:
    """Allocate the result of probabilities(); also its fake implementation."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


@torch.library.custom_op("hotswap::attention_softmax_bwd", mutates_args=())
def softmax_bwd(p: Tensor, dp: Tensor, scale: float) -> Tensor:
    """p, dp (B, H, Tq, Tk) -> ds (B, H, Tq, Tk), the gradient of q k^T."""
    ds = torch.empty_like(p)
    rows = p.shape[:-1].numel()
    _softmax_bwd_kernel[(triton.cdiv(rows, 16),)](p, dp.contiguous(), ds, scale, rows, p.shape[-1], ROWS=16, BLOCK=256)
    return ds


softmax_bwd.register_fake(lambda p, dp, scale: torch.empty_like(p))


def join_heads(t: Tensor, kv_heads: int) -> Tensor:
    """(B, H, T, X) -> (B, Hkv, (H / Hkv) T, X): join the query heads that share a key head into one long head."""
    return t.reshape(t.shape[0], kv_heads, -1, t.shape[-1])


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    q, k, _, ctx.scale = inputs
    ctx.save_for_backward(q, k, output)


def _backward(ctx: FunctionCtx, dp: Tensor) -> tuple[Tensor | None, ...]:
    q, k, p = ctx.saved_tensors
    ds = join_heads(softmax_bwd(p, dp, ctx.scale), k.shape[2])
    dq = (ds @ k.transpose(1, 2)).view(*p.shape[:3], q.shape[-1])
    dk = ds.mT @ join_heads(q.transpose(1, 2), k.shape[2])
    return dq.transpose(1, 2), dk.transpose(1, 2), None, None


softmax_bwd = bypass_dispatcher(softmax_bwd)
probabilities = bypass_dispatcher(probabilities, _backward, _setup_context)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
    check_inputs(q, "triton_naive")
    B, Tq, H, D = q.shape
    p = probabilities(q, k, causal, 1 / math.sqrt(D) if scale is None else scale)
    return (join_heads(p, k.shape[2]) @ v.transpose(1, 2)).view(B, H, Tq, D).transpose(1, 2)
