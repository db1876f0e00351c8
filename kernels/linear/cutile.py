"""Our linear layer in cuTile: three matmuls in NVIDIA's tile language for Python (kernels/cutile.py).

    forward   y = x W^T + b, with the bias in the epilogue
    backward  dx = dy W, dW = dy^T x, and db, the sum of dy's rows

A block computes tiles of 128 x 256 or 256 x 128, over 64 channels at a time, as matmul.py does in Triton. On Hopper
tileiras makes warps that load by TMA, which run ahead into the next tile, and eight warps that multiply with wgmma.
The sum of dW is cut into parts, which other blocks compute, and the parts are added in a fixed order.

Forward and backward of 65,536 x 768 by 768 x 2304 are 696 GFLOP. Their bare matmuls take cuBLAS 0.96 ms on an H200, 726
TFLOP/s. The layer takes 1.06 ms, as it does with linear=eager (commit 3389580). In fp32 the matmuls do not round to
TF32, and are for comparisons of results. Rows that are no multiple of 16 bytes are not moved by TMA.
"""

import torch
import triton
from torch import Tensor

from kernels.cutile import detail, launch, unavailable  # noqa: F401
from kernels.gpu import DTYPES, multiprocessors, unsupported_dtype
from kernels.linear._op import define_linear
from kernels.registry import Unavailable
from kernels.split import split_sum

RUNS = ("cutile_matmul|cutile_linear_fwd",)
FAMILY = "cutile_matmul|cutile_sum_rows"
GROUP = 8  # tiles down before one to the right


def tile_of(dtype: torch.dtype, columns: int) -> tuple[int, int, int]:
    """Return the rows, columns and channels of a tile of a result with so many columns."""
    if dtype == torch.float32:
        return 64, 64, 32
    beyond = -columns % 256  # the columns that tiles of 256 waste
    return (128, 256, 64) if beyond < 128 else (256, 128, 64)


def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None, w_by_rows: bool = True) -> Tensor:
    """Return x w^T + bias (N, F) for contiguous x (N, C), w (F, C) and bias (F,) or None; x w + bias for w (C, F)."""
    from kernels.linear._cutile import cutile_matmul

    N, F = len(x), w.shape[0 if w_by_rows else 1]
    y = x.new_empty(N, F)
    n, f, c = tile_of(x.dtype, F)
    tiles = triton.cdiv(N, n) * triton.cdiv(F, f)
    grid = (min(tiles, multiprocessors(x.device)),)
    launch(
        cutile_matmul,
        grid,
        x=x,
        w=w,
        bias=w[0] if bias is None else bias,
        y=y,
        BLOCK_N=n,
        BLOCK_F=f,
        BLOCK_C=c,
        GROUP=GROUP,
        W_BY_ROWS=w_by_rows,
        HAS_BIAS=bias is not None,
    )
    return y


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Return a^T b (F, C) in the dtype of a, for contiguous a (N, F) and b (N, C), N > 0. It sums in fp32."""
    from kernels._cutile_sums import add_partial_sums
    from kernels.linear._cutile import cutile_matmul_transposed

    (N, F), C = a.shape, b.shape[1]
    f, c, n = tile_of(a.dtype, C)
    tiles = triton.cdiv(F, f) * triton.cdiv(C, c)
    splits, steps = split_sum(triton.cdiv(N, n), tiles, multiprocessors(a.device))
    out = torch.empty(splits, F, C, dtype=a.dtype if splits == 1 else torch.float32, device=a.device)
    launch(
        cutile_matmul_transposed,
        (tiles, splits),
        a=a,
        b=b,
        out=out,
        steps=steps,
        BLOCK_N=n,
        BLOCK_F=f,
        BLOCK_C=c,
        GROUP=GROUP,
    )
    return out[0] if splits == 1 else add_partial_sums(out.view(splits, F * C), a.dtype).view(F, C)


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return matmul(x, weight, bias)


def launch_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (N, C), dweight (F, C) and dbias (F,). Without a bias, dbias is empty."""
    from kernels._cutile_sums import sum_rows

    dx, dweight = matmul(dy, weight, w_by_rows=False), matmul_transposed(dy, x)
    return dx, dweight, dy.new_empty(0) if bias is None else sum_rows(dy)


three_matmuls = define_linear("cutile_linear", launch_forward, launch_backward)


def refusal(x: Tensor, weight: Tensor, *rest: object, **options: object) -> str | None:
    """Return what the kernels take instead of these arguments, or None if they take them."""
    return unsupported_dtype(DTYPES, x, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if reason := refusal(x, weight):
        raise Unavailable(f"linear=cutile takes {reason}: choose kernels.linear=eager")
    return three_matmuls(x, weight, bias)
