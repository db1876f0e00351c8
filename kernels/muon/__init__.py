"""The contract of the op muon: orthogonalise matrices by Newton-Schulz, for the optimizer Muon (Jordan et al. 2024).

    muon(matrices) -> out

    matrices    (n, R, C)   n matrices of one shape, in the dtype of the products
    out         (n, R, C)   each close to U V^T, where U S V^T is the matrix: its singular values are near 1

A matrix is divided by its Frobenius norm, so that no singular value is above 1. A tall one (R > C) is transposed. Then
five steps bring the singular values near 1: in exact arithmetic, one above 0.002 ends between 0.68 and 1.21
(https://kellerjordan.github.io/posts/muon):

    A = X X^T    B = b A + c A^2    X <- a X + B X    (a, b, c) = COEFFICIENTS

X is (m, k) with m <= k. A and B are symmetric, so a kernel may compute one triangle of tiles. A step then takes
m^2 k + m^3 + 2 m^2 k FLOPs, where plain matmuls take 2 m^2 k + 2 m^3 + 2 m^2 k.

Each product is rounded once, after the sum of its epilogue. With a rounding before it, errors in bf16 are 2 to 3 times
as large, because a step makes the error of a small singular value up to 3.4 times as large.

The optimizer calls the op, and not the model (OPTIMIZER), so kernels.compile=true does not compile it. The op has no
gradients. It has no products(), because its FLOPs are no floor: triton.py and gram.py compute the same polynomial with
fewer.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

OPTIMIZER = True  # the optimizer calls it
DEFAULT = "auto"
COEFFICIENTS = 3.4445, -4.7750, 2.0315
STEPS = 5
RESTART = 3  # the step for Gram matrices in float16, by the search of gram-newton-schulz 0.1.6 for COEFFICIENTS
EPS = 1e-7  # is added to the norm: a matrix of zeros stays 0
TENSORS = {"matrices": "n R C"}
ANY_STRIDES = ("matrices",)
ALONG = {"out0": "matrices"}  # the part of the step that reduces the loss

SHAPES = {  # the weights of 12 blocks
    "124m_qkv": {"shape": (12, 2304, 768)},
    "124m_proj": {"shape": (12, 768, 768)},
    "124m_fc": {"shape": (12, 3072, 768)},
    "124m_mlp_proj": {"shape": (12, 768, 3072)},
}

CASES = {
    "wide": {"shape": (3, 40, 96)},
    "tall": {"shape": (2, 96, 40)},
    "square": {"shape": (2, 160, 160)},
    "odd": {"shape": (2, 67, 131)},
    "one": {"shape": (1, 40, 200)},  # with 16 rows the order of the sums moves the scale in float16 by 4e-4
    "large": {"shape": (2, 48, 64), "scale": 1e3},
    "small": {"shape": (2, 48, 64), "scale": 1e-3},
    "non_contiguous": {"shape": (2, 48, 64), "contiguous": False},
    "gradient": {"shape": (16, 64, 128), "spectrum": (1e-3, 1e-5)},
}

SIZES = {f"{R}x{C}": {"shape": (2, R, C)} for R, C in ((64, 64), (192, 768), (769, 96))}
FEATURES = ["tall", "odd", "non_contiguous"]

BOUND = "flops"


def reference(matrices: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    x = matrices / (matrices.square().sum((-2, -1), keepdim=True).sqrt() + EPS)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def scaled(matrices: Tensor) -> Tensor:
    """Return the matrices divided by their Frobenius norms (summed in fp32), transposed if they are tall. Contiguous.

    They are (n, m, k) with m <= k, in the same dtype.
    """
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=dtype)
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    # With `out`, one pass divides in fp32, rounds and transposes
    return torch.div(x, norm + EPS, out=torch.empty_like(x, memory_format=torch.contiguous_format))


def unscaled(x: Tensor, shape: torch.Size) -> Tensor:
    """Return the contiguous result of `shape` from the last X of matrices that scaled() may have transposed."""
    return (x if x.shape == shape else x.mT).contiguous()


def inputs(
    shape: Sequence[int],
    *,
    scale: float = 1.0,
    contiguous: bool = True,
    spectrum: tuple[float, float] | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of muon(), as a dict. The elements have a standard deviation of `scale`.

    With `spectrum` they are like gradients instead: one singular value is 1, and the others fall from the first of
    these numbers to the second.
    """
    generator = torch.Generator(device).manual_seed(seed)
    n, rows, columns = shape
    size = (n, rows, columns) if contiguous else (n, rows, columns + 8)
    matrices = scale * torch.randn(size, generator=generator, device=device)
    if spectrum:
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        first, last = map(math.log10, spectrum)
        others = torch.logspace(first, last, min(rows, columns) - 1, device=device)
        matrices = left * torch.cat([others.new_ones(1), others]) @ right
    return {"matrices": matrices.to(dtype)[..., :columns]}


def cost(shape: Sequence[int], *, dtype: torch.dtype = torch.bfloat16, **_: object) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes)}. A symmetric product has half the FLOPs of another one."""
    n, rows, columns = shape
    m, k = sorted((rows, columns))
    return {"forward": (n * STEPS * (3 * m * m * k + m**3), 2 * n * rows * columns * dtype.itemsize)}
