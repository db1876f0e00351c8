"""SwiGLU in Helion (https://github.com/pytorch/helion) between two of cuBLAS's matmuls: two kernels of five lines.

They move as many bytes as Liger's. The matmuls with SwiGLU in their epilogues are triton.py's. A program has 2048
numbers of a, 16 a thread; norm/helion.py says how to tune it.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.glu._between import define_glu
from kernels.gpu import check_dtypes, triton_and_cublas_detail
from kernels.norm.helion import unavailable  # noqa: F401

RUNS = "helion_swiglu_fwd", "helion_swiglu_bwd"
PROGRAM_ELEMENTS = 2048


def detail(**inputs: Any) -> str:
    return f"helion {version('helion')}, {triton_and_cublas_detail(**inputs)}"


def choose_kernel(name: str, a: Tensor) -> Callable:
    """Return the kernel `name` of _helion.py for a (N, F)."""
    from kernels.glu import _helion

    columns = min(1024, triton.next_power_of_2(a.shape[1]))
    rows = 1 if len(a) == 1 else PROGRAM_ELEMENTS // columns  # for a single row, Helion 1.5.0 omits the mask of rows
    return _helion.kernel(getattr(_helion, name), (rows, columns), 4)


def launch_forward(h: Tensor) -> Tensor:
    """Map h = (gate, up), (N, 2 F), to silu(gate) up, (N, F)."""
    h = h.unflatten(1, (2, -1))
    a = torch.empty_like(h[:, 0], memory_format=torch.contiguous_format)
    choose_kernel("swiglu_fwd", a)(h, a)
    return a


def launch_backward(da: Tensor, h: Tensor) -> Tensor:
    """Return the gradient of h, (N, 2 F)."""
    dh = torch.empty_like(h)
    choose_kernel("swiglu_bwd", da)(da, *(tensor.unflatten(1, (2, -1)) for tensor in (h, dh)))
    return dh


matmuls_and_swiglu = define_glu("helion", launch_forward, launch_backward)


def glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    check_dtypes("glu", x, w_fc, impl="helion")
    return matmuls_and_swiglu(x, w_fc, b_fc, w_proj, b_proj)
