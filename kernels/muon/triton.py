"""Newton-Schulz, whose two symmetric products compute one triangle of tiles. cuBLAS computes the third product.

    Triton   A = X X^T            a program computes a tile below the diagonal or on it, and also writes its transpose
    Triton   B = b A + c A A^T    the same kernel, with the sum in its epilogue. A is symmetric, so A A^T = A^2
    cuBLAS   X <- a X + B X       torch.baddbmm

So a step takes m^2 k + m^3 + 2 m^2 k FLOPs in place of 2 m^2 k + 2 m^3 + 2 m^2 k: for the four shapes of GPT-2 124M
together, 71% of them. The idea is from modded-nanogpt and Dion (arXiv:2504.05295). The loads and the loop over the sum
are those of kernels/matmul.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import check_dtypes, make_context_current
from kernels.gpu import triton_and_cublas_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.matmul import can_use_tma, kernel_argument, multiply_tile, precision, round_to
from kernels.muon import COEFFICIENTS, STEPS, scaled, unscaled

RUNS = ("^_muon_symmetric_kernel|::muon$",)


@triton.jit
def _muon_symmetric_kernel(
    x,  # (n * M, C): matrices (M, C), one below the other
    added_ptr,  # (n, M, M), symmetric; or None
    out_ptr,  # (n, M, M)
    N,  # n * M
    M,
    C,
    alpha,
    beta,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out = alpha X X^T + beta added for each matrix X. Program (i, j, matrix) has a tile, if j <= i."""
    tile_i, tile_j, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile_j <= tile_i:
        row, column = tile_i * BLOCK_M, tile_j * BLOCK_M
        first = matrix * M
        # A tile may have rows of the next matrix: their products are computed, but not stored
        product = multiply_tile(
            x, x, first + row, first + column, N, N, C, True, BLOCK_M, BLOCK_M, BLOCK_C, TMA, PRECISION
        )
        i, j = row + tl.arange(0, BLOCK_M)[:, None], column + tl.arange(0, BLOCK_M)[None, :]
        inside = (i < M) & (j < M)
        start = matrix.to(tl.int64) * M * M
        product *= alpha
        if added_ptr is not None:
            added = tl.load(added_ptr + start + i.to(tl.int64) * M + j, inside, other=0.0)
            product += beta * added.to(tl.float32)
        tile = round_to(product, out_ptr.dtype.element_ty)
        tl.store(out_ptr + start + i.to(tl.int64) * M + j, tile, inside)
        if tile_j < tile_i:
            # Store the transpose by rows: a store by columns would write 2 bytes at a time
            rows, columns = column + tl.arange(0, BLOCK_M)[:, None], row + tl.arange(0, BLOCK_M)[None, :]
            inside = (rows < M) & (columns < M)
            tl.store(out_ptr + start + rows.to(tl.int64) * M + columns, tile.T, inside)


def launch_parameters(dtype: torch.dtype, tma: bool) -> dict[str, int]:
    """Return the sizes of a tile and the warps. Without TMA they fit into the 99 KB of compute capability 8.6."""
    values = (128, 64, 8, 3) if tma else (128, 32, 8, 4)
    if dtype == torch.float32:  # for comparisons of results, not for speed
        values = 64, 32, 4, 1
    return dict(zip(("BLOCK_M", "BLOCK_C", "num_warps", "num_stages"), values, strict=True))


def symmetric_product(x: Tensor, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """Return alpha x x^T + beta added, (n, m, m), for contiguous x (n, m, k), and `added` that is symmetric."""
    n, m, k = x.shape
    out = x.new_empty(n, m, m)
    rows = x.view(n * m, k)
    tma = can_use_tma(rows)
    launch = launch_parameters(x.dtype, tma)
    tiles = triton.cdiv(m, launch["BLOCK_M"])
    make_context_current()
    _muon_symmetric_kernel[(tiles, tiles, n)](
        x=kernel_argument(rows, launch["BLOCK_M"], launch["BLOCK_C"], tma=tma),
        added_ptr=added,
        out_ptr=out,
        N=n * m,
        M=m,
        C=k,
        alpha=alpha,
        beta=beta,
        TMA=tma,
        PRECISION=precision(x.dtype),
        **launch,
    )
    return out


def launch(matrices: Tensor) -> Tensor:
    """Return the orthogonalised matrices (n, R, C), n > 0."""
    a, b, c = COEFFICIENTS
    x = scaled(matrices)
    for _ in range(STEPS):
        gram = symmetric_product(x)
        polynomial = symmetric_product(gram, alpha=c, added=gram, beta=b)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return unscaled(x, matrices.shape)


orthogonalise = custom_op("hotswap::muon", launch, lambda matrices: matrices.new_empty(matrices.shape))


def muon(matrices: Tensor) -> Tensor:
    check_dtypes("muon", matrices)
    return orthogonalise(matrices)
