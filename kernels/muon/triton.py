"""Gram Newton-Schulz (Zhang, Amsel, Chen and Dao 2026, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/).

A step of Newton-Schulz multiplies X (m, k) by a polynomial P of A = X X^T. A is (m, m), with m <= k. So the kernels
iterate on A, and multiply X only by Q, the product of the polynomials:

    A = X X^T
    P = b A + c A^2    Q <- Q P + a Q + q P    q <- a q    A <- (P + a I) A (P + a I)    a step
    X <- Q X + q X

Q begins as 0 and q as 1, and the last step needs no A. Polynomials of A commute, so all products but the last are
symmetric. Their kernel computes the tiles below the diagonal and on it, and also stores the transpose of each (as
modded-nanogpt and Dion, arXiv:2504.05295). Its loads and the loop over the sum are those of kernels/matmul.py.

bfloat16 matrices take these steps in float16, because A in bfloat16 loses the small singular values of X. float16 does
not overflow: no number is above a^3 = 41. After five steps float16 would lose the small values, too. So after RESTART
steps the op computes X <- Q X + q X, and A from the new X. Five steps take 6 m^2 k + 14 m^3 FLOPs, and eager's
20 m^2 k + 10 m^3: for the four shapes of GPT-2 124M together, 46% of them. The RMS error is 0.3 to 0.5 of eager's in
bfloat16, and 0.1 for gradients.

The multiples a and q of I stay numbers beside P and Q: inside, float16 would round a to a multiple of 0.002, and q to
one of 0.03. In a gradient one singular value is 0.99 of the norm, and half of them are below 0.0002. With a I in P, the
step along the gradient was 0.1 to 0.3% too short. In 20 steps of modern_124m the losses differed from fp32's by 10
times as much as those of eager PyTorch in bf16.

For fp32 and float16 matrices the same steps would round to the same dtype as eager, and their errors on random matrices
are 2 to 3 times eager's. So these matrices take the plain steps, with symmetric products: 71% of the FLOPs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import check_dtypes, make_context_current
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.matmul import (
    can_use_tma,
    kernel_argument,
    load_matrix_tile,
    multiply_tile,
    precision,
    round_to,
    split_columns,
)
from kernels.muon import COEFFICIENTS, EPS, RESTART, STEPS, unscaled
from kernels.muon._updates import launch as launch_tiles
from kernels.muon._updates import tile_offsets

RUNS = ("^_muon_(symmetric|product|scale)_kernel|::muon$",)


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
    x_ptr,  # x again if it is added, and then C is M; or None
    y_ptr,  # as x_ptr
    out_ptr,  # (n, M, M)
    N,  # n * M
    M,
    C,
    alpha,
    beta,
    gamma,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out = alpha X Y^T + beta X + gamma Y for each X and Y. Program (i, j, matrix) needs j <= i."""
    tile_i, tile_j, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile_j <= tile_i:
        row, column = tile_i * BLOCK_M, tile_j * BLOCK_M
        first = matrix * M
        # A tile may have rows of the next matrix: their products are computed, but not stored
        product = multiply_tile(
            x, y, first + row, first + column, N, N, C, True, BLOCK_M, BLOCK_M, BLOCK_C, TMA, PRECISION
        )
        start = matrix.to(tl.int64) * M * M
        WIDTH: tl.constexpr = BLOCK_M // PARTS
        parts = split_columns(product, PARTS)
        for k in tl.static_range(PARTS):
            part = alpha * parts[k]
            i, j = row + tl.arange(0, BLOCK_M), column + k * WIDTH + tl.arange(0, WIDTH)
            at = start + i[:, None].to(tl.int64) * M + j[None, :]
            inside = (i[:, None] < M) & (j[None, :] < M)
            if x_ptr is not None:
                part += beta * tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
            if y_ptr is not None:
                part += gamma * tl.load(y_ptr + at, inside, other=0.0).to(tl.float32)
            tile = round_to(part, out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, tile, inside)
            if tile_j < tile_i:
                # Store the transpose by rows: a store by columns would write 2 bytes at a time
                across = start + j[:, None].to(tl.int64) * M + i[None, :]
                tl.store(out_ptr + across, tile.T, (j[:, None] < M) & (i[None, :] < M))


@triton.jit
def _muon_product_kernel(
    q,  # (n * M, M): matrices (M, M), one below the other
    x,  # (n, M, K)
    x_ptr,  # x again
    out_ptr,  # (n, M, K)
    N,  # n * M
    M,
    K,
    identity,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out = (Q + identity I) X for each Q and X. Program (i, j, matrix) has tile (i, j) of out."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_M
    matrix = tl.program_id(2).to(tl.int64)
    first, start = tl.program_id(2) * M, matrix * M * K
    product = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    tl.assume(M > 0)
    for c in range(0, M, BLOCK_C):
        q_tile = load_matrix_tile(q, first + row, c, N, M, BLOCK_M, BLOCK_C, TMA)
        if TMA:
            x_tile = x.load([tl.program_id(2), c, column]).reshape(BLOCK_C, BLOCK_M)
        else:
            x_tile = load_matrix_tile(x + start, c, column, M, K, BLOCK_C, BLOCK_M, False)
        product = tl.dot(q_tile, x_tile, product, input_precision=PRECISION)
    WIDTH: tl.constexpr = BLOCK_M // PARTS
    parts = split_columns(product, PARTS)
    for part in tl.static_range(PARTS):
        i, j = row + tl.arange(0, BLOCK_M)[:, None], column + part * WIDTH + tl.arange(0, WIDTH)[None, :]
        at, inside = start + i.to(tl.int64) * K + j, (i < M) & (j < K)
        tile = parts[part] + identity * tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, round_to(tile, out_ptr.dtype.element_ty), inside)


def launch_parameters(dtype: torch.dtype, tma: bool) -> dict[str, int]:
    """Return the sizes of a tile and the warps. Without TMA they fit into the 99 KB of compute capability 8.6.

    With two PARTS the kernel takes at most 128 registers, and two programs share a multiprocessor. With one it takes
    165, and only one fits.
    """
    values = (128, 64, 2, 8, 3) if tma else (128, 32, 2, 8, 4)
    if dtype == torch.float32:  # for comparisons of results, not for speed
        values = 64, 32, 1, 4, 1
    return dict(zip(("BLOCK_M", "BLOCK_C", "PARTS", "num_warps", "num_stages"), values, strict=True))


def symmetric_product(x: Tensor, y: Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Tensor:
    """Return alpha x y^T + beta x + gamma y, (n, m, m), for contiguous x and y (n, m, k).

    The exact result must be symmetric, because only the tiles below the diagonal and on it are computed. So beta and
    gamma need symmetric x and y.
    """
    n, m, k = x.shape
    assert m == k or beta == gamma == 0
    out = x.new_empty(n, m, m)
    x_rows, y_rows = x.view(n * m, k), y.view(n * m, k)
    tma = can_use_tma(x_rows, y_rows)
    launch = launch_parameters(x.dtype, tma)
    tiles = triton.cdiv(m, launch["BLOCK_M"])
    make_context_current()
    _muon_symmetric_kernel[(tiles, tiles, n)](
        x=kernel_argument(x_rows, launch["BLOCK_M"], launch["BLOCK_C"], tma=tma),
        y=kernel_argument(y_rows, launch["BLOCK_M"], launch["BLOCK_C"], tma=tma),
        x_ptr=x if beta else None,
        y_ptr=y if gamma else None,
        out_ptr=out,
        N=n * m,
        M=m,
        C=k,
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        TMA=tma,
        PRECISION=precision(x.dtype),
        **launch,
    )
    return out


def product(q: Tensor, x: Tensor, identity: float, dtype: torch.dtype) -> Tensor:
    """Return (q + identity I) x, (n, m, k) in `dtype`, for contiguous q (n, m, m) and x (n, m, k)."""
    n, m, k = x.shape
    out = x.new_empty(n, m, k, dtype=dtype)
    q_rows = q.view(n * m, m)
    tma = can_use_tma(q_rows, x)
    launch = launch_parameters(x.dtype, tma)
    make_context_current()
    _muon_product_kernel[(triton.cdiv(m, launch["BLOCK_M"]), triton.cdiv(k, launch["BLOCK_M"]), n)](
        q=kernel_argument(q_rows, launch["BLOCK_M"], launch["BLOCK_C"], tma=tma),
        x=kernel_argument(x, 1, launch["BLOCK_C"], launch["BLOCK_M"], tma=tma),
        x_ptr=x,
        out_ptr=out,
        N=n * m,
        M=m,
        K=k,
        identity=identity,
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
        x = product(symmetric_product(gram, gram, c, b), x, a, x.dtype)
    return x


def gram_steps(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return X in `dtype` after five steps on Gram matrices in float16, the dtype of x."""
    a, b, c = COEFFICIENTS
    for steps, out_dtype in ((RESTART, x.dtype), (STEPS - RESTART, dtype)):
        gram, q, identity = symmetric_product(x, x), None, a
        for step in range(steps):
            p = symmetric_product(gram, gram, c, b)
            if q is None:
                q = p
            else:
                q, identity = symmetric_product(q, p, 1.0, a, identity), a * identity
            if step < steps - 1:
                # (P A) P, because after rounding A and P hardly commute: (A P) P has 2 to 3 times the RMS error
                gram = symmetric_product(symmetric_product(p, gram, 1.0, 0.0, a), p, 1.0, a)
        x = product(q, x, identity, out_dtype)
    return x


def launch(matrices: Tensor) -> Tensor:
    """Return the orthogonalised matrices (n, R, C), n > 0."""
    matrices = matrices.contiguous()
    x = scaled(matrices, torch.linalg.vector_norm(matrices, dim=(-2, -1), dtype=torch.float32))
    x = gram_steps(x, matrices.dtype) if matrices.dtype == torch.bfloat16 else plain_steps(x)
    return unscaled(x, matrices.shape)


orthogonalise = custom_op("hotswap::muon", launch, lambda matrices: matrices.new_empty(matrices.shape))


def muon(matrices: Tensor) -> Tensor:
    check_dtypes("muon", matrices)
    return orthogonalise(matrices)
