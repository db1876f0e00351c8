"""The contract of the op rms_norm: add a branch to the residual stream, then RMSNorm.

It is the op norm without the mean and without a bias (Zhang and Sennrich 2019, arXiv:1910.07467), as in Llama and Qwen.

    rms_norm(x, residual, weight, eps=1e-5) -> (y, new_residual)

    x             (..., C)  the output of the last branch, in the compute dtype; the embedding if residual is None
    residual      (..., C)  the residual stream so far, in a dtype at least as wide as the dtype of x; or None
    weight        (C,)      in the compute dtype
    y             (..., C)  RMSNorm(residual + x), in the dtype of weight, which is the compute dtype
    new_residual  (..., C)  residual + x, in the dtype of residual; x if residual is None

A backend may return NaN gradients for weights for which they would be imprecise, with why_nan(weight), as in norm.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import norm

TENSORS = {"x": "... C", "residual": "... C", "weight": "C"}
ANY_STRIDES = ("x", "residual")

# The shapes to measure: the widths of GPT-2 124M, of SmolLM2-135M, and of Llama-3.2-1B. A row is a token
SHAPES = {
    "124m": {"shape": (262144, 768)},
    "smollm2-135m": {"shape": (262144, 576)},
    "llama3.2-1b": {"shape": (65536, 2048)},
    "124m-fp32-residual": {"shape": (262144, 768), "residual_dtype": torch.float32},
}

# The cases of norm, without those about means and biases
NO_CASES = "far_mean", "no_bias", "plain"
CASES = {name: case for name, case in norm.CASES.items() if name not in NO_CASES} | {"576": {"shape": (2, 16, 576)}}

SIZES = {str(C): {"shape": (5, C)} for C in (64, 576, 769, 2048, 4096)}
FEATURES = ["fp32_residual"]

MODEL = {"norm": "rmsnorm"}
BOUND = "bytes"
FAMILY = r"(?i)rms_?norm"


in_model = partial(norm.in_model, kind="rmsnorm")


def reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    residual = x if residual is None else residual + x
    y = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + eps) * weight
    return y.to(weight.dtype), residual


def inputs(shape: Sequence[int], **options: Any) -> dict[str, Any]:
    """Return random arguments of rms_norm(), as a dict. The options are those of the inputs() of norm, without bias."""
    arguments = norm.inputs(shape, bias=False, **options)
    del arguments["bias"]
    return arguments


def cost(
    shape: Sequence[int],
    *,
    residual: bool = True,
    residual_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **_: object,
) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes), "backward": (FLOPs, bytes)}: those of norm, without its means."""
    elements, means = torch.Size(shape).numel(), 4 * (torch.Size(shape).numel() // shape[-1])
    costs = norm.cost(shape, residual=residual, bias=False, residual_dtype=residual_dtype, dtype=dtype)
    flops = {"forward": 5 * elements, "backward": 11 * elements}
    return {way: (flops[way], moved - means) for way, (_, moved) in costs.items()}
