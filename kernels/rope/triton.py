"""Rotary positions in one pass over packed queries, keys and values, with their RMSNorm; and the backward in another.

Forward. A program loads a tile of a few tokens and heads, in two halves: channels i and i + D/2, which turn together.
So a pair is in one thread, and the rotation needs no exchange. With weights, the tile is first normalised: a head lies
in one program, so its sum of squares is in registers. It writes the rotated queries and keys, and copies the values, so
q, k and v stay in one tensor. Plain PyTorch reads and writes queries and keys some ten times.

Backward. The inverse rotation turns the gradient back by the same angles. Without weights that is all, and autograd
saves only the table. With weights, xhat = x rstd and g = dy weight, where dy is the gradient after turning back:

    dx = rstd (g - xhat mean(g xhat))        dweight = sum over tokens and heads of dy xhat

Autograd then saves qkv, and the backward recomputes rstd from it, because it needs x anyway. triton_recompute.py saves
less. A program walks over many tokens and sums its part of both dweights in registers. A small kernel adds the parts in
a fixed order.

The forward moves each element of qkv twice, so bytes limit it: 302 MB each way for 65,536 tokens of GPT-2's heads. On
an H200 forward and backward take 0.32 ms there, 89% of a copy's speed; torch.compile takes 0.58, and Liger 1.78.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op
from kernels.gpu import check_dtypes, multiprocessors
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.norm._triton_backward import max_ratio
from kernels.sums import add_partial_sums
from kernels.tuned import launch_parameters

RUNS = "^_rope_fwd_kernel|::rope_fwd", "^_rope_bwd_kernel|::rope_bwd"
FAMILY = "_rope_"
PROGRAMS = 8  # of the backward with weights, for each multiprocessor, so that it leaves about 1,000 parts; not timed


@triton.jit
def _offsets(tokens, heads, columns, HEADS, HALF: tl.constexpr):
    """Return the offsets of a tile's left halves in (tokens, HEADS, 2 HALF). The right halves are HALF further."""
    rows = tokens[:, None, None] * HEADS + heads[None, :, None]
    return rows * (2 * HALF) + columns[None, None, :]


@triton.jit
def _load_angles(table_ptr, tokens, columns, N, T, table_rows, HALF: tl.constexpr):
    """Return the cosines and sines of the tokens, (BLOCK_T, 1, BLOCK_D) each."""
    # a table of T rows is for all sequences, and otherwise it has a row for each token
    rows = tl.where(table_rows == N, tokens, tokens % T)
    offsets = rows[:, None, None] * HALF + columns[None, None, :]
    mask = (tokens < N)[:, None, None] & (columns < HALF)[None, None, :]
    cos = tl.load(table_ptr + offsets, mask, other=0.0)
    sin = tl.load(table_ptr + table_rows.to(tl.int64) * HALF + offsets, mask, other=0.0)
    return cos, sin


@triton.jit
def _load_weights(q_weight_ptr, k_weight_ptr, heads, columns, KV_HEADS, HEADS, HALF: tl.constexpr):
    """Return the norm's weight for each head and channel of a half, (1, BLOCK_H, BLOCK_D)."""
    in_half = columns < HALF
    q_weight = tl.load(q_weight_ptr + columns, in_half, other=0.0).to(tl.float32)[None, None, :]
    k_weight = tl.load(k_weight_ptr + columns, in_half, other=0.0).to(tl.float32)[None, None, :]
    return tl.where((heads < HEADS - 2 * KV_HEADS)[None, :, None], q_weight, k_weight)


@triton.jit
def _rstd_offsets(tokens, heads, N, TURNED):
    """Return the offsets of a tile in (N, TURNED), and which of its elements exist."""
    return tokens[:, None] * TURNED + heads[None, :], (tokens < N)[:, None] & (heads < TURNED)[None, :]


@triton.jit
def _inverse(weight, partner, MAX_RATIO: tl.constexpr):
    """Return 1 / weight, or NaN where that is imprecise: see triton_recompute.py. `partner` turns with weight."""
    is_precise = (weight != 0.0) & (tl.abs(partner) <= MAX_RATIO * tl.abs(weight))
    return 1.0 / tl.where(is_precise, weight, float("nan"))


@triton.jit(do_not_specialize=["N", "T", "table_rows"])  # another batch size or length must not recompile
def _rope_fwd_kernel(
    x_ptr,  # (N, HEADS, 2 HALF): N = B T tokens
    table_ptr,  # (2, table_rows, HALF) fp32
    q_weight_ptr,  # (2 HALF,), or None
    k_weight_ptr,
    out_ptr,  # like x
    rstd_ptr,  # (N, HEADS - KV_HEADS) fp32, of the queries and keys; None unless the backward needs it
    N,
    T,
    table_rows,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    offsets = _offsets(tokens, heads, columns, HEADS, HALF)
    mask = (tokens < N)[:, None, None] & (heads < HEADS)[None, :, None] & (columns < HALF)[None, None, :]
    left = tl.load(x_ptr + offsets, mask, other=0.0)
    right = tl.load(x_ptr + offsets + HALF, mask, other=0.0)
    cos, sin = _load_angles(table_ptr, tokens, columns, N, T, table_rows, HALF)
    a, b = left.to(tl.float32), right.to(tl.float32)
    if q_weight_ptr is not None:
        rstd = tl.rsqrt(tl.sum(a * a + b * b, 2) / (2 * HALF) + eps)
        if rstd_ptr is not None:
            rows, is_turned = _rstd_offsets(tokens, heads, N, HEADS - KV_HEADS)
            tl.store(rstd_ptr + rows, rstd, is_turned)
        rstd = rstd[:, :, None]
        a *= rstd * _load_weights(q_weight_ptr, k_weight_ptr, heads, columns, KV_HEADS, HEADS, HALF)
        b *= rstd * _load_weights(q_weight_ptr + HALF, k_weight_ptr + HALF, heads, columns, KV_HEADS, HEADS, HALF)
    turns = (heads < HEADS - KV_HEADS)[None, :, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, tl.where(turns, (a * cos - b * sin).to(dtype), left), mask)
    tl.store(out_ptr + offsets + HALF, tl.where(turns, (b * cos + a * sin).to(dtype), right), mask)


@triton.jit(do_not_specialize=["N", "T", "table_rows"])
def _rope_bwd_kernel(
    dout_ptr,  # (N, HEADS, 2 HALF)
    saved_ptr,  # the forward's x, or with rstd_ptr its output; None without weights
    rstd_ptr,  # (N, HEADS - KV_HEADS) fp32, or None
    table_ptr,  # (2, table_rows, HALF) fp32
    q_weight_ptr,  # (2 HALF,), or None
    k_weight_ptr,
    dx_ptr,  # like dout
    partial_ptr,  # (programs, 2, 2 HALF) fp32: this program's part of dq_weight and dk_weight; None without weights
    N,
    T,
    table_rows,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_RATIO: tl.constexpr,  # of the weights of two channels that turn together; only with rstd_ptr
):
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    is_query, is_rotated = heads < HEADS - 2 * KV_HEADS, heads < HEADS - KV_HEADS
    turns = is_rotated[None, :, None]
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    dw_left = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    dw_right = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for start in tl.range(first * BLOCK_T, N, tl.num_programs(0) * BLOCK_T):  # one iteration without weights
        tokens = start + tl.arange(0, BLOCK_T).to(tl.int64)
        offsets = _offsets(tokens, heads, columns, HEADS, HALF)
        mask = (tokens < N)[:, None, None] & (heads < HEADS)[None, :, None] & (columns < HALF)[None, None, :]
        left = tl.load(dout_ptr + offsets, mask, other=0.0)
        right = tl.load(dout_ptr + offsets + HALF, mask, other=0.0)
        cos, sin = _load_angles(table_ptr, tokens, columns, N, T, table_rows, HALF)
        c, d = left.to(tl.float32), right.to(tl.float32)
        a, b = c * cos + d * sin, d * cos - c * sin
        if saved_ptr is not None:
            x_left = tl.load(saved_ptr + offsets, mask & turns, other=0.0).to(tl.float32)  # not the values
            x_right = tl.load(saved_ptr + offsets + HALF, mask & turns, other=0.0).to(tl.float32)
            w_left = _load_weights(q_weight_ptr, k_weight_ptr, heads, columns, KV_HEADS, HEADS, HALF)
            w_right = _load_weights(q_weight_ptr + HALF, k_weight_ptr + HALF, heads, columns, KV_HEADS, HEADS, HALF)
            if rstd_ptr is None:
                rstd = tl.rsqrt(tl.sum(x_left * x_left + x_right * x_right, 2) / (2 * HALF) + eps)[:, :, None]
                x_left *= rstd
                x_right *= rstd
            else:
                rows, is_turned = _rstd_offsets(tokens, heads, N, HEADS - KV_HEADS)
                rstd = tl.load(rstd_ptr + rows, is_turned, other=0.0)[:, :, None]
                y_left, y_right = x_left * cos + x_right * sin, x_right * cos - x_left * sin
                x_left = tl.where(mask & turns, y_left * _inverse(w_left, w_right, MAX_RATIO), 0.0)
                x_right = tl.where(mask & turns, y_right * _inverse(w_right, w_left, MAX_RATIO), 0.0)
            dw_left += tl.sum(a * x_left, 0)
            dw_right += tl.sum(b * x_right, 0)
            a *= w_left
            b *= w_right
            mean = (tl.sum(a * x_left + b * x_right, 2) / (2 * HALF))[:, :, None]
            a = rstd * (a - x_left * mean)
            b = rstd * (b - x_right * mean)
        tl.store(dx_ptr + offsets, tl.where(turns, a.to(dtype), left), mask)
        tl.store(dx_ptr + offsets + HALF, tl.where(turns, b.to(dtype), right), mask)
    if partial_ptr is not None:
        row = (first * tl.num_programs(1) + tl.program_id(1)) * 2
        for i in tl.static_range(2):
            these = (is_query if i == 0 else is_rotated & ~is_query)[:, None]
            target = partial_ptr + (row + i) * (2 * HALF) + columns
            tl.store(target, tl.sum(tl.where(these, dw_left, 0.0), 0), columns < HALF)
            tl.store(target + HALF, tl.sum(tl.where(these, dw_right, 0.0), 0), columns < HALF)


def default_launch(half: int) -> dict[str, int]:
    """Return the default launch parameters: tiles of 1,024 pairs, 8 a thread. With 16 the norm's backward spills."""
    width = triton.next_power_of_2(half)
    heads = max(1, min(16, 1024 // width))
    return {"BLOCK_T": 1024 // (heads * width) or 1, "BLOCK_H": heads, "BLOCK_D": width, "num_warps": 4}


def candidates(kernel: str, default: dict) -> list[dict]:
    width, choices = default["BLOCK_D"], []
    for heads in (4, 8, 16):
        for elements in (1024, 2048, 4096):
            tokens = max(1, elements // (heads * width))
            choices += [{"BLOCK_T": tokens, "BLOCK_H": heads, "num_warps": warps} for warps in (2, 4, 8)]
    return choices


def choose_launch(
    kernel: str,
    x: Tensor,
    table: Tensor,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of a kernel for x (B, T, HEADS, D), and its arguments but the tensors like x."""
    B, T, heads, D = x.shape
    key = f"{heads} {D} {x.dtype}{' norm' if q_weight is not None else ''}"
    launch = launch_parameters(kernel, key, default_launch(D // 2), x.device)
    arguments = {"table_ptr": table, "q_weight_ptr": q_weight, "k_weight_ptr": k_weight, "table_rows": table.shape[1]}
    arguments |= {"N": B * T, "T": T, "eps": eps, "HEADS": heads, "KV_HEADS": kv_heads, "HALF": D // 2}
    return (triton.cdiv(B * T, launch["BLOCK_T"]), triton.cdiv(heads, launch["BLOCK_H"])), arguments | launch


def launch_forward(
    qkv: Tensor, table: Tensor, kv_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float
) -> Tensor:
    """Return the rotated qkv (B, T, HEADS, D). qkv and table (2, rows, D/2) are contiguous."""
    out = torch.empty_like(qkv)
    grid, arguments = choose_launch("rope_fwd", qkv, table, kv_heads, q_weight, k_weight, eps)
    _rope_fwd_kernel[grid](x_ptr=qkv, out_ptr=out, rstd_ptr=None, **arguments)
    return out


def launch_backward(
    dout: Tensor,
    saved: Tensor | None,
    rstd: Tensor | None,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dqkv, dq_weight and dk_weight. Without weights, the last two are empty and `saved` is not needed.

    `saved` is the forward's qkv, or with rstd (B, T, H + Hkv) in fp32 its output.
    """
    dqkv, D, partial = torch.empty_like(dout), dout.shape[3], None
    grid, arguments = choose_launch("rope_bwd", dout, table, kv_heads, q_weight, k_weight, eps)
    if q_weight is not None:
        programs = max(1, PROGRAMS * multiprocessors(dout.device) // grid[1])
        grid = min(grid[0], programs), grid[1]
        partial = torch.empty(grid[0] * grid[1], 2 * D, dtype=torch.float32, device=dout.device)
    arguments["MAX_RATIO"] = None if rstd is None else max_ratio(dout.dtype)
    tensors = {"dout_ptr": dout, "saved_ptr": saved, "rstd_ptr": rstd, "dx_ptr": dqkv, "partial_ptr": partial}
    _rope_bwd_kernel[grid](**tensors, **arguments)
    if q_weight is None:
        return dqkv, dout.new_empty(0), dout.new_empty(0)
    dq_weight, dk_weight = add_partial_sums(partial, q_weight.dtype).split(D)
    return dqkv, dq_weight.clone(), dk_weight.clone()  # the outputs of an operator share no memory


def empty_gradients(
    dout: Tensor, saved: Tensor | None, rstd: Tensor | None, table: Tensor, q_weight: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    if q_weight is None:
        return torch.empty_like(dout), dout.new_empty(0), dout.new_empty(0)
    return torch.empty_like(dout), torch.empty_like(q_weight), torch.empty_like(q_weight)


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    qkv, table, kv_heads, q_weight, k_weight, eps = inputs
    ctx.save_for_backward(None if q_weight is None else qkv, None, table, q_weight, k_weight)
    ctx.options = kv_heads, eps


def backward(ctx: FunctionCtx, dout: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dqkv, dq_weight, dk_weight = rope_bwd(dout.contiguous(), *ctx.saved_tensors, *ctx.options)
    return dqkv, None, None, dq_weight, dk_weight, None


rope_bwd = custom_op("hotswap::rope_bwd", launch_backward, empty_gradients)
rope_fwd = custom_op(
    "hotswap::rope_fwd", launch_forward, lambda qkv, *_: torch.empty_like(qkv), backward, _setup_context
)


def rope(
    qkv: Tensor,
    table: Tensor,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    check_dtypes("rope", qkv, q_weight)
    rows = table.reshape(2, -1, table.shape[-1]).contiguous()
    return rope_fwd(qkv.contiguous(), rows, kv_heads, q_weight, k_weight, eps)
