"""FlashAttention-2 (Dao 2023, arXiv:2307.08691) in cuTile: the method of triton.py, in NVIDIA's tile language.

    forward   a block has 128 queries of a head and walks over the keys, 128 at a time. It keeps each query's largest
              score, sum of exponentials and sum of values, rescales the sums when the largest score changes, and saves
              lse, the log of the sum of exp(score), 4 bytes for a query and a head
    dq        a block has 128 queries again, recomputes p = exp(s - lse), and adds ds k. It also writes delta, the sum
              of dout out, which the next kernel reads
    dk, dv    a block has 128 keys, and walks over the queries of all heads that share them

triton.py derives the formulas. The scores exist only as tiles. Every sum belongs to one block, so no atomics are
needed, and two calls give the same bits. The backward has seven matmuls instead of five, because both of its kernels
recompute s and dp. Only the tiles that the diagonal, a window or the last key crosses are masked.

At (32, 1024, 12, 64) in bf16 the causal forward is 52 GFLOP, 201 million exponentials and 0.2 GB. An H200 takes 0.065
ms for the matmuls at 790 TFLOP/s, about as long for the exponentials (triton.py), and 0.05 ms for the bytes. So the
work must overlap (Shah et al. 2024, arXiv:2407.08608), and tileiras decides how. On Hopper it makes warps that load
tiles by TMA, and two groups of four warps that multiply 64 rows each with wgmma. The loop of the forward has no barrier
between the groups, so one can take exponentials while the other multiplies. p stays in registers, and k^T is read from
the tile of k in shared memory. On an H200 (commit 3389580) the forward takes 0.207 ms and the backward 0.600, in
triton.py 0.176 and 0.428.

q, k and v may be views of one packed tensor, and the gradients are views of one buffer (packed.py). Lengths and
documents are not supported.
"""

import torch
import triton
from torch import Tensor

from kernels.attention._op import define_attention, refused_options
from kernels.attention._triton_tiles import empty_outputs
from kernels.cutile import detail, launch, unavailable  # noqa: F401
from kernels.gpu import DTYPES
from kernels.packed import align_rows, gradient_buffer, gradient_views
from kernels.registry import Unavailable

# With 256 channels and tiles of 64 x 64, tileiras 13.5 spills in dkdv, and lets each wgmma wait for the one before it
MAX_HEAD_DIM = 128
KEEPS = ("hotswap::cutile_attention_fwd",)
RUNS = "cutile_attention_fwd", "cutile_attention_dq", "cutile_attention_dkdv"
FAMILY = "cutile_attention"
# {kernel: {D rounded up to a power of two: (queries, keys) of a tile}}. In 16 bits nothing spills
SIZES = {
    "fwd": {64: (128, 128), 128: (128, 128)},
    "dq": {64: (128, 128), 128: (128, 64)},
    "dkdv": {64: (128, 128), 128: (64, 128)},
}


def tile_of(kernel: str, q: Tensor) -> tuple[int, int, int]:
    """Return the queries, the keys and the channels of a tile."""
    width = max(16, triton.next_power_of_2(q.shape[3]))
    sizes = (32, 32) if q.dtype == torch.float32 else SIZES[kernel][max(64, width)]
    return *sizes, width


def launch_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> tuple[Tensor, Tensor]:
    from kernels.attention._cutile import cutile_attention_fwd

    q, k, v = map(align_rows, (q, k, v))
    B, Tq, H, _ = q.shape
    out, lse = empty_outputs(q)
    M, N, D = tile_of("fwd", q)
    launch(
        cutile_attention_fwd,
        (triton.cdiv(Tq, M), H, B),
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        scale=scale,
        window=window,
        M=M,
        N=N,
        D=D,
        CAUSAL=causal,
    )
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
    from kernels.attention._cutile import cutile_attention_dkdv, cutile_attention_dq

    grads = gradient_buffer(q, k)
    dq, dk, dv = gradient_views(grads, q, k)
    q, k, v, dout, out = *map(align_rows, (q, k, v)), dout.contiguous(), out.contiguous()
    B, Tq, H, _ = q.shape
    Tk, Hkv = k.shape[1:3]
    delta = torch.empty_like(lse)
    M, N, D = tile_of("dq", q)
    launch(
        cutile_attention_dq,
        (triton.cdiv(Tq, M), H, B),
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
        M=M,
        N=N,
        D=D,
        CAUSAL=causal,
    )
    M, N, D = tile_of("dkdv", q)
    launch(
        cutile_attention_dkdv,
        (triton.cdiv(Tk, N), Hkv, B),
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
        M=M,
        N=N,
        D=D,
        CAUSAL=causal,
    )
    return grads


flash_attention = define_attention("cutile_attention", launch_forward, launch_backward)


def refusal(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None, **_: object
) -> str | None:
    """Return what the kernels take instead of these arguments, or None if they take them."""
    if q.shape[3] > MAX_HEAD_DIM:
        return f"heads of up to {MAX_HEAD_DIM} channels, not {q.shape[3]}"
    return refused_options(DTYPES, q, k, v, causal, window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, window: int | None = None
) -> Tensor:
    if reason := refusal(q, k, v, causal=causal, window=window):
        raise Unavailable(f"attention=cutile takes {reason}: choose attn=sdpa")
    return flash_attention(q, k, v, causal, scale, window)
