"""The contract of the op linear: the two projections of attention, one matmul with a bias each.

    linear(x, weight, bias, fp8=False) -> y

    y = x @ weight.T + bias

    x       (..., C)
    weight  (F, C)     F = 3 C for queries, keys and values in GPT-2; F = C for the output. With model.head_dim the
                       output projection has C = n_head * head_dim and F = n_embd, and may not be square
    bias    (F,)       or None
    y       (..., F)

All tensors are in the compute dtype. With fp8=True, a backend and reference() compute the products as kernels/fp8.py
does. For a square weight, dweight is then computed in the compute dtype. A backend may lack this argument.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import fp8 as products_in_fp8

TENSORS = {"x": "... C", "weight": "F C", "bias": "F"}
ANY_STRIDES = ("x",)
OPTIONAL = ("fp8",)  # arguments that a backend may lack

SHAPES = {
    "124m": {"shape": (65536, 768), "out": 2304},
    "124m_fp8": {"shape": (65536, 768), "out": 2304, "fp8": True},
    "1558m": {"shape": (32768, 1600), "out": 4800},
    "smollm2-135m": {"shape": (65536, 576), "out": 960},
}

CASES = {
    "768": {"shape": (2, 16, 768), "out": 2304},
    "1600": {"shape": (3, 1600), "out": 1600},
    "769": {"shape": (5, 769), "out": 1025},
    "one_row": {"shape": (1, 128), "out": 384},
    "many_rows": {"shape": (1031, 64), "out": 96},
    "no_bias": {"shape": (33, 128), "out": 128, "bias": False},
    "far_from_zero": {"shape": (33, 128), "out": 128, "scale": 20.0},
    "non_contiguous": {"shape": (6, 10, 128), "out": 384, "contiguous": False},
    "fp8": {"shape": (2, 32, 128), "out": 384, "fp8": True},
    "fp8_odd": {"shape": (7, 65), "out": 131, "fp8": True},
    "fp8_square": {"shape": (3, 31, 96), "out": 96, "fp8": True},
}

SIZES = {str(C): {"shape": (5, C), "out": C} for C in (64, 768, 769, 1600, 4096)}
FEATURES = ["no_bias", "fp8"]

BOUND = "flops"


def in_model(
    *, batch: int, length: int, n_embd: int, n_head: int, kv_heads: int, head_dim: int, **_: object
) -> dict[str, Any]:
    return {"shape": (batch, length, n_embd), "out": (n_head + 2 * kv_heads) * head_dim}


def dweight_in_fp8(weight: Tensor) -> bool:
    """Return whether dweight is in fp8: unless the weight is square, as GPT-2's output projection (kernels/fp8.py)."""
    return weight.shape[0] != weight.shape[1]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, fp8: bool = False) -> Tensor:
    if fp8:
        return products_in_fp8.linear(x, weight, bias, dweight_in_fp8=dweight_in_fp8(weight))
    y = x @ weight.T
    return y if bias is None else y + bias


def inputs(
    shape: Sequence[int],
    *,
    out: int,
    bias: bool = True,
    scale: float = 1.0,
    contiguous: bool = True,
    fp8: bool = False,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of linear(), as a dict. x has a standard deviation of `scale`.

    The weights are scaled so that x @ weight.T has the variance of x.
    """
    generator = torch.Generator(device).manual_seed(seed)
    width = shape[-1]

    def randn(*size: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(*size, generator=generator, device=device)).to(dtype)

    x = randn(*shape, std=scale) if contiguous else randn(*shape[:-1], width + 8, std=scale)[..., :width]
    tensors = {"x": x, "weight": randn(out, width, std=width**-0.5), "bias": randn(out, std=0.1) if bias else None}
    arguments = {name: None if t is None else t.detach().requires_grad_() for name, t in tensors.items()}
    return arguments | ({"fp8": True} if fp8 else {})


def cost(
    shape: Sequence[int], *, out: int, bias: bool = True, dtype: torch.dtype = torch.bfloat16, **_: object
) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes), "backward": (FLOPs, bytes)}: one matmul forward, and two backward."""
    width = shape[-1]
    rows = torch.Size(shape).numel() // width
    weights, product = out * width + (out if bias else 0), 2 * rows * width * out
    forward, backward = weights + rows * (width + out), 2 * weights - (out if bias else 0) + rows * (2 * width + out)
    return {"forward": (product, forward * dtype.itemsize), "backward": (2 * product, backward * dtype.itemsize)}


def products(shape: Sequence[int], *, out: int, **_: object) -> dict[str, list[tuple[int, int, int]]]:
    """Return (rows, inner, columns) of the plain matmuls, forward and backward: the floor of the op's time."""
    width = shape[-1]
    rows = torch.Size(shape).numel() // width
    return {"forward": [(rows, width, out)], "backward": [(rows, out, width), (out, rows, width)]}
