"""The contract of the op norm: add a branch to the residual stream, then LayerNorm.

The addition and the LayerNorm are one op because they read the same rows.

    norm(x, residual, weight, bias, eps=1e-5) -> (y, new_residual)

    x             (..., C)  the output of the last branch, in the compute dtype; the embedding if residual is None
    residual      (..., C)  the residual stream so far, in a dtype at least as wide as the dtype of x; or None
    weight        (C,)      in the compute dtype
    bias          (C,)      or None
    y             (..., C)  LayerNorm(residual + x), in the dtype of weight, which is the compute dtype
    new_residual  (..., C)  residual + x, in the dtype of residual; x if residual is None

A backend may return NaN gradients for parameters for which they would be imprecise. Such a backend has
why_nan(weight, bias), which returns the reason as text for the user, or None.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TENSORS = {"x": "... C", "residual": "... C", "weight": "C", "bias": "C"}
ANY_STRIDES = ("x", "residual")

# The shapes to measure: GPT-2's widths, and a wide one. A row is a token.
SHAPES = {
    "124m": {"shape": (262144, 768)},
    "1558m": {"shape": (131072, 1600)},
    "wide": {"shape": (65536, 4096)},
    "124m-fp32-residual": {"shape": (262144, 768), "residual_dtype": torch.float32},
    "1558m-fp32-residual": {"shape": (131072, 1600), "residual_dtype": torch.float32},
}

# What breaks kernels: widths that are not a power of two, few rows, means far from zero, layouts, weights near zero
CASES = {
    "768": {"shape": (2, 16, 768)},
    "1600": {"shape": (3, 1600)},
    "769": {"shape": (5, 769)},
    "1025": {"shape": (4, 1025)},
    "4096": {"shape": (3, 4096)},
    "8192": {"shape": (2, 8192)},
    "narrow": {"shape": (7, 5)},
    "one_row": {"shape": (1, 768)},
    "many_rows": {"shape": (1031, 64)},
    "far_mean": {"shape": (8, 768), "mean": 100.0},
    "no_residual": {"shape": (2, 9, 768), "residual": False},
    "no_bias": {"shape": (2, 9, 768), "bias": False},
    "plain": {"shape": (6, 769), "residual": False, "bias": False},
    "fp32_residual": {"shape": (2, 9, 768), "residual_dtype": torch.float32},
    "fp32_embedding": {"shape": (2, 9, 768), "residual": False, "residual_dtype": torch.float32},
    "non_contiguous": {"shape": (6, 10, 768), "contiguous": False},
    "small_weights": {"shape": (2, 9, 64), "around": 0.0},
    "eps": {"shape": (2, 9, 64), "eps": 0.5},
}

SIZES = {str(C): {"shape": (5, C)} for C in (64, 768, 769, 1600, 4096)}
FEATURES = ["fp32_residual", "no_bias"]

BOUND = "bytes"
FAMILY = r"(?i)layer_?norm|GammaBeta"


def in_model(
    *,
    norm: str,
    eps: float,
    batch: int,
    length: int,
    n_embd: int,
    residual_dtype: torch.dtype,
    kind: str = "layernorm",
    **_: object,
) -> dict[str, Any] | None:
    """Return the call of a model whose norms are of this kind. eps is left out if it is the default."""
    if norm != kind:
        return None
    arguments = {"shape": (batch, length, n_embd), "residual_dtype": residual_dtype}
    return arguments if eps == 1e-5 else arguments | {"eps": eps}


def reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return (y, new_residual) by the formula of Ba et al. 2016 (arXiv:1607.06450)."""
    residual = x if residual is None else residual + x
    mean = residual.mean(-1, keepdim=True)
    variance = (residual - mean).square().mean(-1, keepdim=True)
    y = (residual - mean) * torch.rsqrt(variance + eps) * weight
    return (y if bias is None else y + bias).to(weight.dtype), residual


def inputs(
    shape: Sequence[int],
    *,
    residual: bool = True,
    bias: bool = True,
    mean: float = 0.0,
    around: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    contiguous: bool = True,
    eps: float | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of norm(), as a dict. A bias is about a tenth of its weight.

    Weights have mean `around` and deviation 0.1. `residual_dtype`, by default `dtype`, is the dtype of residual, or of
    x if residual=False. If it is narrower than `dtype`, it is widened.
    """
    generator = torch.Generator(device).manual_seed(seed)
    residual_dtype = torch.promote_types(residual_dtype or dtype, dtype)

    def randn(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    def activations(dtype: torch.dtype) -> Tensor:  # contiguous=False slices wider rows, as `qkv.chunk` would
        padding = 0 if contiguous else 3
        wide = randn(*shape[:-1], shape[-1] + padding, dtype=dtype) + mean
        return wide[..., : shape[-1]]

    weight = around + 0.1 * randn(shape[-1])
    tensors = {
        "x": activations(dtype if residual else residual_dtype),
        "residual": activations(residual_dtype) if residual else None,
        "weight": weight,
        "bias": 0.1 * randn(shape[-1]) * weight if bias else None,
    }
    arguments = {name: None if t is None else t.detach().requires_grad_() for name, t in tensors.items()}
    return arguments | ({"eps": eps} if eps else {})


def cost(
    shape: Sequence[int],
    *,
    residual: bool = True,
    bias: bool = True,
    residual_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **_: object,
) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes), "backward": (FLOPs, bytes)}.

    The forward reads x and residual, and writes y and the new residual. Without a residual it reads x and writes y.
    The backward reads dy, the gradient of the new residual, and the new residual itself. It writes one gradient, which
    is both dx and dresidual, or two gradients if x and residual differ in dtype.
    """
    elements, width = torch.Size(shape).numel(), shape[-1]
    residual_dtype = torch.promote_types(residual_dtype or dtype, dtype)
    branch, stream = elements * dtype.itemsize, elements * residual_dtype.itemsize  # bytes of x and of residual
    parameters = (2 if bias else 1) * width * dtype.itemsize
    statistics = 2 * 4 * (elements // width)  # mean and rstd, fp32
    forward = branch + stream + parameters + statistics
    backward = branch + 3 * stream + 2 * parameters + statistics
    if residual:
        forward += branch + stream
        backward += branch if residual_dtype != dtype else 0
    return {"forward": (8 * elements, forward), "backward": (14 * elements, backward)}
