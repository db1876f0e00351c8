"""Gram Newton-Schulz (Zhang, Amsel, Chen and Dao 2026, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/).

A step of Newton-Schulz multiplies X (m, k) by a polynomial P of A = X X^T. A is (m, m), with m <= k. So the kernels
iterate on A, and multiply X only by Q, the product of the polynomials:

    Triton   A = X X^T
    Triton   P = a + b A + c A^2    Q <- Q P    A <- P A P    a step; the last one needs no A
    cuBLAS   X <- Q X

Polynomials of A commute, so all products in Triton are symmetric. The kernel computes the tiles below the diagonal and
on it, and also stores the transpose of each (as modded-nanogpt and Dion, arXiv:2504.05295). Its loads and the loop over
the sum are those of kernels/matmul.py.

bfloat16 matrices take these steps in float16, because A in bfloat16 loses the small singular values of X. float16 does
not overflow: no number is above a^3 = 41. After five steps float16 would lose the small values, too. So after RESTART
steps the op computes X <- Q X, and A from the new X. Five steps take 6 m^2 k + 14 m^3 FLOPs, and eager's 20 m^2 k +
10 m^3: for the four shapes of GPT-2 124M together, 46% of them. The RMS error is 0.2 to 0.4 of eager's in bfloat16.

For fp32 and float16 matrices the same steps would round to the same dtype as eager, and their errors are up to 5 times
eager's. Eager adds a X without rounding a. Here P contains a I, and its rounding error enters all later products. So
these matrices take the plain steps, with symmetric products: 71% of the FLOPs.
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
from kernels.muon import COEFFICIENTS, EPS, RESTART, STEPS, unscaled
from kernels.muon._updates import launch as launch_tiles
from kernels.muon._updates import tile_offsets

RUNS = ("^_muon_(symmetric|scale)_kernel|::muon$",)


@triton.jit
def _muon_scale_kernel(
    matrices_ptr,  # matrix j begins at j * stride
    norm_ptr,  # (n,) fp32
    x_ptr,  # contiguous
    eps,
    stride,
    R,
    C,
    BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    at, x_at, inside = tile_offsets(stride, R, C, BLOCK, TRANSPOSED)
    x = tl.load(matrices_ptr + at, inside, other=0.0).to(tl.float32) / (tl.load(norm_ptr + tl.program_id(2)) + eps)
    tl.store(x_ptr + x_at, x.to(x_ptr.dtype.element_ty), inside)


@triton.jit
def _muon_symmetric_kernel(
    x,  # (n * M, C): matrices (M, C), one below the other
    y,  # as x
    added_ptr,  # (n, M, M), symmetric; or None
    out_ptr,  # (n, M, M)
    N,  # n * M
    M,
    C,
    alpha,
    beta,
    diagonal,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out = alpha X Y^T + beta added + diagonal I for each X and Y. Program (i, j, matrix) needs j <= i."""
    tile_i, tile_j, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile_j <= tile_i:
        row, column = tile_i * BLOCK_M, tile_j * BLOCK_M
        first = matrix * M
        # A tile may have rows of the next matrix: their products are computed, but not stored
        product = multiply_tile(
            x, y, first + row, first + column, N, N, C, True, BLOCK_M, BLOCK_M, BLOCK_C, TMA, PRECISION
        )
        i, j = row + tl.arange(0, BLOCK_M)[:, None], column + tl.arange(0, BLOCK_M)[None, :]
        inside = (i < M) & (j < M)
        start = matrix.to(tl.int64) * M * M
        product *= alpha
        if added_ptr is not None:
            added = tl.load(added_ptr + start + i.to(tl.int64) * M + j, inside, other=0.0)
            product += beta * added.to(tl.float32)
            # Without this branch the kernel takes 189 registers on 9.0, and 128 with it. With 189 only one program fits
            # on a multiprocessor: on an H200 12 products of 768 take 22.4 us, and 14.6 without `added` and `diagonal`
            if tile_i == tile_j:
                product += tl.where(i == j, diagonal, 0.0)
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


def symmetric_product(
    x: Tensor, y: Tensor, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """Return alpha x y^T + beta added + diagonal I, (n, m, m), for contiguous x and y (n, m, k) and symmetric `added`.

    The exact result must be symmetric, because only the tiles below the diagonal and on it are computed. `diagonal`
    needs `added`.
    """
    assert added is not None or diagonal == 0
    n, m, k = x.shape
    out = x.new_empty(n, m, m)
    x_rows, y_rows = x.view(n * m, k), y.view(n * m, k)
    tma = can_use_tma(x_rows, y_rows)
    launch = launch_parameters(x.dtype, tma)
    tiles = triton.cdiv(m, launch["BLOCK_M"])
    make_context_current()
    _muon_symmetric_kernel[(tiles, tiles, n)](
        x=kernel_argument(x_rows, launch["BLOCK_M"], launch["BLOCK_C"], tma=tma),
        y=kernel_argument(y_rows, launch["BLOCK_M"], launch["BLOCK_C"], tma=tma),
        added_ptr=added,
        out_ptr=out,
        N=n * m,
        M=m,
        C=k,
        alpha=alpha,
        beta=beta,
        diagonal=diagonal,
        TMA=tma,
        PRECISION=precision(x.dtype),
        **launch,
    )
    return out


def scaled(matrices: Tensor, norm: Tensor) -> Tensor:
    """Return matrices / (norm + EPS), contiguous, transposed if they are tall. bfloat16 becomes float16.

    norm is (n,) fp32.

    On an H200, PyTorch's division by a norm for each matrix takes 123 us for (12, 768, 3072) in bf16, 0.9 TB/s.
    """
    n, *shape = matrices.shape
    dtype = torch.float16 if matrices.dtype == torch.bfloat16 else matrices.dtype
    x = matrices.new_empty(n, min(shape), max(shape), dtype=dtype)
    launch_tiles(_muon_scale_kernel, matrices, matrices_ptr=matrices, norm_ptr=norm, x_ptr=x, eps=EPS)
    return x


def plain_steps(x: Tensor) -> Tensor:
    """Return X after five steps on X itself."""
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = symmetric_product(x, x)
        x = torch.baddbmm(x, symmetric_product(gram, gram, c, added=gram, beta=b), x, beta=a)
    return x


def gram_steps(x: Tensor) -> Tensor:
    """Return X after five steps on Gram matrices."""
    a, b, c = COEFFICIENTS
    for steps in (RESTART, STEPS - RESTART):
        gram, product = symmetric_product(x, x), None
        for step in range(steps):
            polynomial = symmetric_product(gram, gram, c, added=gram, beta=b, diagonal=a)
            product = polynomial if product is None else symmetric_product(product, polynomial)
            if step < steps - 1:
                gram = symmetric_product(symmetric_product(polynomial, gram), polynomial)
        x = torch.bmm(product, x)
    return x


def launch(matrices: Tensor) -> Tensor:
    """Return the orthogonalised matrices (n, R, C), n > 0."""
    matrices = matrices.contiguous()
    x = scaled(matrices, torch.linalg.vector_norm(matrices, dim=(-2, -1), dtype=torch.float32))
    x = gram_steps(x) if matrices.dtype == torch.bfloat16 else plain_steps(x)
    return unscaled(x.to(matrices.dtype), matrices.shape)


orthogonalise = custom_op("hotswap::muon", launch, lambda matrices: matrices.new_empty(matrices.shape))


def muon(matrices: Tensor) -> Tensor:
    check_dtypes("muon", matrices)
    return orthogonalise(matrices)
