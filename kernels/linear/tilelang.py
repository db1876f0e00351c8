"""Three matmuls in TileLang (https://github.com/tile-ai/tilelang), of which the first adds the bias in its epilogue.

    forward   y = x W^T + b
    backward  dx = dy W, dW = dy^T x, and db, the sum of dy's rows (kernels/tilelang.py)

T.gemm() is Hopper's wgmma here, with both operands in shared memory. T.Pipelined() keeps a ring of tiles in shared
memory. One warpgroup, with 24 registers a thread, loads tiles by TMA; the others multiply. TMA also brings the zeros
beyond an edge, and drops what is stored there, so the number of rows is free. It takes rows that begin at multiples of
16 bytes, so the widths are multiples of 8. No layout of shared memory is written here: TileLang swizzles the tiles as
TMA and wgmma agree, also where an operand is read by columns (W in dx, and both in dW).

    y and dx  a tile of 128 x 128, 64 channels at a time. With C = 768 the sum is short, and the tensor cores would
              wait for the epilogue. So two programs share a multiprocessor: one stores while the other multiplies.
              A multiplying thread needs 224 registers, of which 128 are the sums; a program has 128 threads of each
              kind, 31744 of its 32768 registers. The tile is copied over the ring in shared memory, and TMA stores it
              from there. Programs that read the same rows of x are adjacent, so x should come from memory once, and
              W stay in the L2
    dW        a tile of 128 x 256 over a part of the tokens, as matmul.py splits it. Each of the two multiplying
              warpgroups has 64 rows. The parts are fp32, and another kernel adds them in a fixed order: two runs give
              the same bits

The baseline is cuBLAS. For QKV of 65,536 tokens of 768 channels on an H200 its matmuls take 322, 307 and 328 us, and
matmul.py's in Triton 339, 316 and 328. The layer takes 0.365 ms forward and 0.728 backward, and with linear=triton
0.339 and 0.727 (commit 3389580).
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.gpu import align, hopper_unavailable, multiprocessors, refused_widths
from kernels.linear._op import define_linear
from kernels.registry import Unavailable
from kernels.split import split_sum
from kernels.tilelang import add_partial_sums, detail, dtype_name, launch, sum_rows  # noqa: F401
from kernels.tilelang import unavailable as tilelang_unavailable

RUNS = "tilelang_matmul", "tilelang_split_matmul"
FAMILY = "tilelang_(split_)?matmul|tilelang_sum_rows"


class Tile(NamedTuple):
    """A tile of a matmul's result, and how a program computes it."""

    rows: int
    columns: int
    depth: int  # of the sum, at once
    stages: int
    threads: int  # that multiply
    registers: int  # of each of them
    programs: int  # for each multiprocessor


TILE = Tile(rows=128, columns=128, depth=64, stages=3, threads=128, registers=224, programs=2)
SPLIT_TILE = Tile(rows=128, columns=256, depth=64, stages=4, threads=256, registers=240, programs=1)


def unavailable(device: torch.device) -> str | None:
    return tilelang_unavailable(device) or hopper_unavailable("linear", device)


def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None, w_by_rows: bool = True) -> Tensor:
    """Return x w^T + bias (N, F) for x (N, C), w (F, C) and bias (F,) or None; x w + bias for w (C, F)."""
    from kernels.linear import _tilelang

    N, C = x.shape
    F = w.shape[0] if w_by_rows else w.shape[1]
    y = x.new_empty(N, F)
    kernel = _tilelang.matmul(C, F, TILE, w_by_rows=w_by_rows, has_bias=bias is not None, dtype=dtype_name(x))
    launch(kernel, x=align(x), w=align(w), bias=align(bias), y=y)
    return y


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Return a^T b (F, C) in the dtype of a, for a (N, F) and b (N, C). It sums in fp32."""
    from kernels.linear import _tilelang

    (N, F), C = a.shape, b.shape[1]
    tiles = triton.cdiv(F, SPLIT_TILE.rows) * triton.cdiv(C, SPLIT_TILE.columns)
    programs = SPLIT_TILE.programs * multiprocessors(a.device)
    splits, steps = split_sum(triton.cdiv(N, SPLIT_TILE.depth), tiles, programs)
    out = torch.empty(splits, F, C, dtype=a.dtype if splits == 1 else torch.float32, device=a.device)
    kernel = _tilelang.split_matmul(F, C, SPLIT_TILE, dtype_name(a), dtype_name(out))
    launch(kernel, a=align(a), b=align(b), out=out, steps=steps)
    return out[0] if splits == 1 else add_partial_sums(out.view(splits, F * C), a.dtype).view(F, C)


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return matmul(x, weight, bias)


def launch_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (N, C), dweight (F, C) and dbias (F,). Without a bias, dbias is empty."""
    dx, dweight = matmul(dy, weight, w_by_rows=False), matmul_transposed(dy, x)
    return dx, dweight, dy.new_empty(0) if bias is None else sum_rows(align(dy))


three_matmuls = define_linear("tilelang_linear", launch_forward, launch_backward)


def refusal(x: Tensor, weight: Tensor, *rest: object, **options: object) -> str | None:
    """Return what the kernels take instead of these arguments, or None if they take them."""
    return refused_widths(x, *reversed(weight.shape))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if reason := refusal(x, weight):
        raise Unavailable(f"linear=tilelang takes {reason}: choose kernels.linear=eager")
    return three_matmuls(x, weight, bias)
