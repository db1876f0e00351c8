"""The contract of the op glu: the gated MLP of a block, SwiGLU (Shazeer 2020, arXiv:2002.05202), as in Llama and Qwen.

    glu(x, w_fc, b_fc, w_proj, b_proj, fp8=False) -> y

    gate, up = (x @ w_fc.T + b_fc).chunk(2, -1)
    y = (silu(gate) * up) @ w_proj.T + b_proj

    x       (..., C)
    w_fc    (2 F, C)   the rows of the gate, then the rows of up: one matmul computes both
    b_fc    (2 F,)     or None
    w_proj  (C, F)
    b_proj  (C,)       or None
    y       (..., C)

All tensors are in the compute dtype, and silu(g) = g sigmoid(g). With fp8=True, a backend and reference() compute the
products as kernels/fp8.py does. A backend may lack this argument.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import fp8 as products_in_fp8
from kernels import linear

TENSORS = {"x": "... C", "w_fc": "2F C", "b_fc": "2F", "w_proj": "C F", "b_proj": "C"}
ANY_STRIDES = ("x",)
OPTIONAL = ("fp8",)  # arguments that a backend may lack

# SmolLM2-135M, GPT-2 124M's parameters as a gated MLP, and Llama-3.2-1B
SHAPES = {
    "smollm2-135m": {"shape": (65536, 576), "hidden": 1536},
    "124m": {"shape": (65536, 768), "hidden": 2048},
    "124m_fp8": {"shape": (65536, 768), "hidden": 2048, "fp8": True},
    "llama3.2-1b": {"shape": (16384, 2048), "hidden": 8192},
}

CASES = {
    "576": {"shape": (2, 16, 576), "hidden": 1536},
    "2048": {"shape": (3, 2048), "hidden": 640},
    "769": {"shape": (5, 769), "hidden": 260},
    "1025": {"shape": (2, 1025), "hidden": 516},
    "odd": {"shape": (7, 65), "hidden": 131},
    "one_row": {"shape": (1, 128)},
    "many_rows": {"shape": (1153, 64), "hidden": 512},
    "bias": {"shape": (33, 128), "bias": True},
    "far_from_zero": {"shape": (33, 128), "scale": 20.0},
    "non_contiguous": {"shape": (6, 10, 128), "contiguous": False},
    "fp8": {"shape": (2, 32, 128), "fp8": True},
    "fp8_bias": {"shape": (2, 32, 128), "bias": True, "fp8": True},
    "fp8_odd": {"shape": (7, 65), "hidden": 131, "fp8": True},
    "fp8_tail": {"shape": (5, 64), "hidden": 63, "fp8": True},
}

SIZES = {str(C): {"shape": (5, C)} for C in (64, 576, 769, 2048)}
FEATURES = ["bias", "fp8"]

MODEL = {"mlp": "swiglu"}
BOUND = "flops"
FAMILY = r"(?i)swiglu|silu"


def in_model(*, batch: int, length: int, n_embd: int, mlp: str, hidden: int, **_: object) -> dict[str, Any] | None:
    return {"shape": (batch, length, n_embd), "hidden": hidden} if mlp == "swiglu" else None


def conflict(w_fc: Tensor, w_proj: Tensor, **_: object) -> str | None:
    """Return, in one line, why the sizes of the weights do not fit together, or None."""
    rows, F = w_fc.shape[0], w_proj.shape[1]
    return None if rows == 2 * F else f"w_fc has {rows} rows, and w_proj {F} columns: w_fc must have twice as many"


def swiglu(h: Tensor) -> Tensor:
    """Return silu(gate) * up (..., F) of h (..., 2 F), the gate and up side by side."""
    gate, up = h.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def reference(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, fp8: bool = False
) -> Tensor:
    layer = products_in_fp8.linear if fp8 else linear.reference
    return layer(swiglu(layer(x, w_fc, b_fc)), w_proj, b_proj)


def inputs(
    shape: Sequence[int],
    *,
    hidden: int | None = None,
    bias: bool = False,
    scale: float = 1.0,
    contiguous: bool = True,
    fp8: bool = False,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of glu(), as a dict: those of two linear(). x has a standard deviation of `scale`.

    `hidden` is F; None: 2 C.
    """
    width = shape[-1]
    hidden = hidden or 2 * width
    options = {"bias": bias, "dtype": dtype, "device": device}
    fc = linear.inputs(shape, out=2 * hidden, scale=scale, contiguous=contiguous, seed=seed, **options)
    proj = linear.inputs((1, hidden), out=width, seed=seed + 1, **options)
    arguments = {"x": fc["x"], "w_fc": fc["weight"], "b_fc": fc["bias"]}
    arguments |= {"w_proj": proj["weight"], "b_proj": proj["bias"]}
    return arguments | ({"fp8": True} if fp8 else {})


def cost(
    shape: Sequence[int],
    *,
    hidden: int | None = None,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **_: object,
) -> dict[str, tuple[int, int]]:
    """Return the FLOPs and bytes of the matmuls with 3 C F weights forward, and of twice as many backward.

    The forward writes gate and up. The backward reads them, and recomputes their product.
    """
    width = shape[-1]
    hidden = hidden or 2 * width
    rows = torch.Size(shape).numel() // width
    product = 2 * rows * width * 3 * hidden
    weights = 3 * width * hidden + (width + 2 * hidden if bias else 0)
    forward = weights + 2 * rows * width + 2 * rows * hidden
    backward = 2 * weights + 3 * rows * width + 2 * rows * hidden
    return {
        "forward": (product, forward * dtype.itemsize),
        "backward": (2 * product, backward * dtype.itemsize),
    }


def products(shape: Sequence[int], *, hidden: int | None = None, **_: object) -> dict[str, list[tuple[int, int, int]]]:
    """Return (rows, inner, columns) of the plain matmuls, forward and backward: the floor of the op's time."""
    hidden = hidden or 2 * shape[-1]
    fc, proj = linear.products(shape, out=2 * hidden), linear.products((*shape[:-1], hidden), out=shape[-1])
    return {way: fc[way] + proj[way] for way in fc}
