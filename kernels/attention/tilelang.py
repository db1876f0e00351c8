"""FlashAttention-2 (Dao 2023, arXiv:2307.08691) in TileLang (https://github.com/tile-ai/tilelang).

    forward   a program has 128 queries of a head and walks over the keys, 128 at a time. It keeps each query's largest
              score, sum of exponentials and sum of values, and saves lse, 4 bytes for a query and a head
    dq        a program has 128 queries again, recomputes p = exp(s - lse), and adds ds k. It also writes delta, the
              sum of dout out, which the next kernel reads
    dk, dv    a program has 128 keys, and walks over the queries of all heads that share them

triton.py derives the formulas. Every sum belongs to one program, so no atomics are needed, and two calls give the same
bits. The backward has seven matmuls instead of five, because both of its kernels recompute s and dp. Only the tiles
that the diagonal, a window or the last key crosses are masked.

At (32, 1024, 12, 64) in bf16 the causal forward is 52 GFLOP, 201 million exponentials and 0.2 GB, and the backward's
seven matmuls are 180 GFLOP. An H200 takes 0.065 ms for the forward's matmuls at 790 TFLOP/s, about as long for the
exponentials (triton.py), and 0.05 ms for the bytes. So matmuls and exponentials should overlap.

In the CUDA that TileLang writes, a program has 384 threads. One warpgroup, with 24 registers a thread, loads tiles by
TMA, those of the loop into rings of two. The other two have 240 registers a thread, and each multiplies 64 rows with
wgmma. They wait for each other only after their loop. So one may take exponentials while the other multiplies. Each
waits for its own products. Four threads hold a row of scores and exchange its largest and its sum by shuffles. p and ds
go from registers into the next product, and the tiles of k, v, q and dout are read as they lie in shared memory, by
rows or by columns: no tile is transposed or copied. TMA also stores out and the gradients, from the place in shared
memory where q or k and v were. Nothing spills. The forward takes 0.209 ms and the backward 0.632, and with
attention=triton 0.176 and 0.428 (H200, commit 3389580). tests/kernels/emulate_tilelang.py runs the CUDA on a CPU.

q, k and v may be views of one packed tensor, and the gradients are views of one buffer (packed.py). Lengths, documents
and fp32 are not supported, nor head dims that 16, the depth of a wgmma, does not divide.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention._op import define_attention, refused_options
from kernels.attention._triton_tiles import empty_outputs, fits_tma
from kernels.gpu import DTYPES, align, hopper_unavailable
from kernels.packed import gradient_buffer, gradient_views
from kernels.registry import Unavailable
from kernels.tilelang import detail, dtype_name, launch  # noqa: F401
from kernels.tilelang import unavailable as tilelang_unavailable

MAX_HEAD_DIM = 128
KEEPS = ("hotswap::tilelang_attention_fwd",)
RUNS = "tilelang_attention_fwd", "tilelang_attention_dq", "tilelang_attention_dkdv"
FAMILY = "tilelang_attention"


class Tile(NamedTuple):
    """A tile of scores, and how a program computes it."""

    queries: int
    keys: int
    stages: int = 2
    threads: int = 256  # that multiply; 128 more load
    registers: int = 240  # of a thread that multiplies


# {kernel: {D rounded up to 64 or 128: tile}}. Nothing spills
TILES = {
    "fwd": {64: Tile(128, 128), 128: Tile(128, 128)},
    "dq": {64: Tile(128, 128), 128: Tile(128, 64)},
    "dkdv": {64: Tile(128, 128), 128: Tile(64, 128)},
}


def unavailable(device: torch.device) -> str | None:
    return tilelang_unavailable(device) or hopper_unavailable("attention", device)


def options(kernel: str, q: Tensor, k: Tensor, causal: bool) -> tuple[int, int, Tile, bool, str]:
    """Return the arguments for which a kernel is compiled: D, query heads for a key head, tile, causal and dtype."""
    D = q.shape[3]
    return D, q.shape[2] // k.shape[2], TILES[kernel][64 if D <= 64 else 128], causal, dtype_name(q)


def align_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` (B, T, H, D), or a contiguous copy if TMA cannot read it."""
    can_read = tensor.stride(-1) == 1 and fits_tma(tensor)
    return tensor if can_read else tensor.clone(memory_format=torch.contiguous_format)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> tuple[Tensor, Tensor]:
    from kernels.attention import _tilelang

    q, k, v = map(align_rows, (q, k, v))
    out, lse = empty_outputs(q)
    kernel = _tilelang.attention_fwd(*options("fwd", q, k, causal))
    launch(kernel, q=q, k=k, v=v, out=out, lse=lse, scale=scale, window=window)
    return out, lse


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int,
) -> Tensor:
    from kernels.attention import _tilelang

    grads = gradient_buffer(q, k)
    dq, dk, dv = gradient_views(grads, q, k)
    q, k, v, dout, out = *map(align_rows, (q, k, v)), align(dout), align(out)
    delta = torch.empty_like(lse)
    launch(
        _tilelang.attention_dq(*options("dq", q, k, causal)),
        q=q,
        k=k,
        v=v,
        out=out,
        dout=dout,
        lse=lse,
        delta=delta,
        dq=dq,
        scale=scale,
        window=window,
    )
    launch(
        _tilelang.attention_dkdv(*options("dkdv", q, k, causal)),
        q=q,
        k=k,
        v=v,
        dout=dout,
        lse=lse,
        delta=delta,
        dk=dk,
        dv=dv,
        scale=scale,
        window=window,
    )
    return grads


flash_attention = define_attention("tilelang_attention", launch_forward, launch_backward)


def refusal(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None, **_: object
) -> str | None:
    """Return what the kernels take instead of these arguments, or None if they take them."""
    if q.shape[3] % 16 or q.shape[3] > MAX_HEAD_DIM:
        return f"heads of up to {MAX_HEAD_DIM} channels, in multiples of 16, not {q.shape[3]}"
    return refused_options(DTYPES[1:], q, k, v, causal, window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, window: int | None = None
) -> Tensor:
    if reason := refusal(q, k, v, causal=causal, window=window):
        raise Unavailable(f"attention=tilelang takes {reason}: choose attn=sdpa")
    return flash_attention(q, k, v, causal, scale, window)
