"""The contract of the op mlp: the MLP of a block, two matmuls with an activation between them.

    mlp(x, w_fc, b_fc, w_proj, b_proj, fp8=False, activation="gelu") -> y

    y = activation(x @ w_fc.T + b_fc) @ w_proj.T + b_proj

    x       (..., C)
    w_fc    (F, C)     F = 4 C in GPT-2
    b_fc    (F,)       or None
    w_proj  (C, F)
    b_proj  (C,)       or None
    y       (..., C)
    activation  "gelu", the tanh form of GPT-2 (Hendrycks and Gimpel 2016, arXiv:1606.08415), or "relu2",
                relu(h)^2 (So et al. 2021, arXiv:2109.08668)

All tensors are in the compute dtype. With fp8=True, a backend and reference() compute the products as kernels/fp8.py
does. A backend may lack the last two arguments. The registry then raises Unavailable for a model that needs one.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import fp8 as products_in_fp8
from kernels import linear

TENSORS = {"x": "... C", "w_fc": "F C", "b_fc": "F", "w_proj": "C F", "b_proj": "C"}
ANY_STRIDES = ("x",)
OPTIONAL = ("fp8", "activation")  # arguments that a backend may lack

SHAPES = {
    "124m": {"shape": (65536, 768)},
    "124m_fp8": {"shape": (65536, 768), "fp8": True},
    "1558m": {"shape": (32768, 1600)},
}

CASES = {
    "768": {"shape": (2, 16, 768)},
    "1600": {"shape": (3, 1600), "hidden": 640},  # 4 x 1600 takes 12 s on a CPU, in all backends
    "769": {"shape": (5, 769), "hidden": 260},
    "1025": {"shape": (2, 1025), "hidden": 516},
    "odd": {"shape": (7, 65), "hidden": 131},
    "one_row": {"shape": (1, 128)},
    "many_rows": {"shape": (1153, 64), "hidden": 512},  # in fp32, triton has 19 x 2 tiles: two bands of 8, and one of 3
    "no_bias": {"shape": (33, 128), "bias": False},
    "far_from_zero": {"shape": (33, 128), "scale": 20.0},
    "non_contiguous": {"shape": (6, 10, 128), "contiguous": False},
    "fp8": {"shape": (2, 32, 128), "fp8": True},
    "fp8_odd": {"shape": (7, 65), "hidden": 131, "fp8": True},
    "relu2": {"shape": (33, 128), "activation": "relu2"},
    "relu2_fp8": {"shape": (33, 128), "activation": "relu2", "fp8": True},
}

SIZES = {str(C): {"shape": (5, C)} for C in (64, 768, 769, 1600, 4096)}
FEATURES = ["no_bias", "fp8", "relu2"]

BOUND = "flops"
FAMILY = r"(?i)mlp|gelu"


def in_model(*, batch: int, length: int, n_embd: int, mlp: str, hidden: int, **_: object) -> dict[str, Any] | None:
    if mlp not in ACTIVATIONS:
        return None
    options = {} if mlp == "gelu" else {"activation": mlp}
    return {"shape": (batch, length, n_embd), "hidden": hidden, **options}


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square()


ACTIVATIONS = {"gelu": gelu, "relu2": relu2}


def conflict(activation: str = "gelu", **_: object) -> str | None:
    """Return, in one line, why there is no such activation, or None."""
    return None if activation in ACTIVATIONS else f"activation={activation!r}: choose {' or '.join(ACTIVATIONS)}"


def reference(
    x: Tensor,
    w_fc: Tensor,
    b_fc: Tensor | None,
    w_proj: Tensor,
    b_proj: Tensor | None,
    fp8: bool = False,
    activation: str = "gelu",
) -> Tensor:
    layer = products_in_fp8.linear if fp8 else linear.reference
    return layer(ACTIVATIONS[activation](layer(x, w_fc, b_fc)), w_proj, b_proj)


def inputs(
    shape: Sequence[int],
    *,
    hidden: int | None = None,
    bias: bool = True,
    scale: float = 1.0,
    contiguous: bool = True,
    fp8: bool = False,
    activation: str | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of mlp(), as a dict: those of two linear(). x has a standard deviation of `scale`."""
    width = shape[-1]
    hidden = hidden or 4 * width
    common = {"bias": bias, "dtype": dtype, "device": device}
    fc = linear.inputs(shape, out=hidden, scale=scale, contiguous=contiguous, seed=seed, **common)
    proj = linear.inputs((1, hidden), out=width, seed=seed + 1, **common)
    arguments = {"x": fc["x"], "w_fc": fc["weight"], "b_fc": fc["bias"]}
    arguments |= {"w_proj": proj["weight"], "b_proj": proj["bias"]}
    options = {"activation": activation} if activation else {}
    return arguments | options | ({"fp8": True} if fp8 else {})


def cost(
    shape: Sequence[int],
    *,
    hidden: int | None = None,
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    **_: object,
) -> dict[str, tuple[int, int]]:
    """Return the FLOPs and bytes of two matmuls forward, and of four backward.

    The forward writes the pre-activation. The backward reads it, and recomputes the activation.
    """
    width = shape[-1]
    hidden = hidden or 4 * width
    rows = torch.Size(shape).numel() // width
    product = 2 * rows * width * hidden
    weights = 2 * width * hidden + (width + hidden if bias else 0)
    forward = weights + 2 * rows * width + rows * hidden
    backward = 2 * weights + 3 * rows * width + rows * hidden
    return {
        "forward": (2 * product, forward * dtype.itemsize),
        "backward": (4 * product, backward * dtype.itemsize),
    }


def products(shape: Sequence[int], *, hidden: int | None = None, **_: object) -> dict[str, list[tuple[int, int, int]]]:
    """Return (rows, inner, columns) of the plain matmuls, forward and backward: the floor of the op's time."""
    hidden = hidden or 4 * shape[-1]
    fc, proj = linear.products(shape, out=hidden), linear.products((*shape[:-1], hidden), out=shape[-1])
    return {way: fc[way] + proj[way] for way in fc}
