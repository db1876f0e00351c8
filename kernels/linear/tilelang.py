"""Three matmuls in TileLang (https://github.com/tile-ai/tilelang), of which the first adds the bias in its epilogue.

    forward   y = x W^T + b
    backward  dx = dy W, dW = dy^T x, and db, the sum of dy's rows (kernels/tilelang.py)

T.gemm() is Hopper's wgmma here, with both operands in shared memory. T.Pipelined() makes a ring of tiles of it: one
warpgroup, which keeps 24 registers a thread, asks for tiles by TMA, and the others multiply. TMA also brings the
zeros beyond an edge, and drops what is stored there, so the number of rows is free. It takes rows that begin at
multiples of 16 bytes, so the widths are multiples of 8. No layout of shared memory is written here: TileLang swizzles
the tiles as TMA and wgmma agree, also where an operand is read by columns (W in dx, and both in dW).

    y and dx  a tile of 128 x 128, 64 channels at a time. With C = 768 the sum is short, and the tensor cores would
              wait for the epilogue. So two programs share a multiprocessor: one stores while the other multiplies.
              A multiplying thread needs 224 registers, of which 128 are the sums; a program has 128 threads of each
              kind, 31744 of its 32768 registers. The tile goes through shared memory, over the ring's, and out by TMA.
              Programs with one block of x follow each other, so x comes from memory once, and W stays in the L2
    dW        a tile of 128 x 256 over a part of the tokens, as matmul.py splits it. Each of the two multiplying
              warpgroups has 64 rows. The parts are fp32, and another kernel adds them in a fixed order: two runs give
              the same bits

The roof is cuBLAS. For QKV of 65,536 tokens of 768 channels on an H200 its matmuls take 322, 307 and 328 us, and
matmul.py's in Triton 339, 316 and 328.
"""

from types import ModuleType

import torch
import triton
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.gpu import hopper_unavailable, make_context_current, multiprocessors
from kernels.matmul import split_sum
from kernels.registry import Unavailable
from kernels.tilelang import add_partial_sums, aligned, check_dtypes, detail, dtype_name, sum_rows  # noqa: F401
from kernels.tilelang import unavailable as tilelang_unavailable

RUNS = "tilelang_matmul", "tilelang_split_matmul"
FAMILY = "tilelang_(split_)?matmul|tilelang_sum_rows"
# rows, columns, steps of the sum at once, stages, threads that multiply, their registers, programs a multiprocessor
TILE = 128, 128, 64, 3, 128, 224, 2
SPLIT_TILE = 64, 128, 256, 4, 256, 240, 1  # first the rows of a and b that are summed at once


def unavailable(device: torch.device) -> str | None:
    return tilelang_unavailable(device) or hopper_unavailable("linear", device)


def kernels() -> ModuleType:
    """Return _tilelang.py. Importing it imports TileLang."""
    from kernels.linear import _tilelang

    return _tilelang


def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None, w_by_rows: bool = True) -> Tensor:
    """Return x w^T + bias (N, F) for x (N, C), w (F, C) and bias (F,) or None; x w + bias for w (C, F)."""
    N, C = x.shape
    F = w.shape[0] if w_by_rows else w.shape[1]
    y = x.new_empty(N, F)
    kernel = kernels().matmul(C, F, TILE, w_by_rows, bias is not None, dtype_name(x))
    make_context_current()
    kernel(aligned(x), aligned(w), aligned(bias), y)
    return y


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Return a^T b (F, C) in the dtype of a, for a (N, F) and b (N, C). It sums in fp32."""
    (N, F), C = a.shape, b.shape[1]
    rows, block_f, block_c, *_, programs = SPLIT_TILE
    tiles = triton.cdiv(F, block_f) * triton.cdiv(C, block_c)
    splits, steps = split_sum(triton.cdiv(N, rows), tiles, programs * multiprocessors(a.device))
    out = torch.empty(splits, F, C, dtype=a.dtype if splits == 1 else torch.float32, device=a.device)
    make_context_current()
    kernels().split_matmul(F, C, SPLIT_TILE, dtype_name(a), dtype_name(out))(aligned(a), aligned(b), out, steps)
    return out[0] if splits == 1 else add_partial_sums(out.view(splits, F * C), a.dtype).view(F, C)


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return matmul(x, weight, bias)


def launch_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (N, C), dweight (F, C) and dbias (F,). Without a bias, dbias is empty."""
    dx, dweight = matmul(dy, weight, w_by_rows=False), matmul_transposed(dy, x)
    return dx, dweight, dy.new_empty(0) if bias is None else sum_rows(aligned(dy))


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return linear_bwd(dy.contiguous(), *ctx.saved_tensors)


linear_bwd = custom_op("hotswap::tilelang_linear_bwd", launch_backward, lambda dy, *inputs: empty_gradients(*inputs))
linear_fwd = custom_op(
    "hotswap::tilelang_linear_fwd",
    launch_forward,
    lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    _backward,
    _setup_context,
)


def refusal(x: Tensor, weight: Tensor, *rest: object, **options: object) -> str | None:
    """Return what the kernels take instead of these arguments, or None if they take them."""
    if any(width % 8 for width in weight.shape):
        return "widths that are multiples of 8, not {1} and {0}".format(*weight.shape)
    if x.dtype == torch.float32:
        return "bfloat16 and float16, because its matmuls round float32 to TF32"
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if reason := refusal(x, weight):
        raise Unavailable(f"linear=tilelang takes {reason}: choose kernels.linear=eager")
    check_dtypes("linear", x, weight, dtypes=(torch.bfloat16, torch.float16))
    return linear_fwd(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias).view(*x.shape[:-1], len(weight))
