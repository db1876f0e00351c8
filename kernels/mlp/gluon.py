"""The MLP of triton.py for Hopper, in Gluon, Triton's lower-level dialect, which gives warps different roles.

_gluon_kernel.py has the kernel, its method and its times: two matmuls with GELU and its derivative in their epilogues,
which run during the matmul of the next tile. In fp8 the epilogue rounds too, so no pass over the product follows.
cuBLAS computes the four other matmuls (_op.py, _fp8.py).
"""

from functools import partial

import torch
from torch import Tensor

from kernels.fp8 import X_SCALE, InFp8
from kernels.gpu import hopper_unavailable
from kernels.gpu import triton_and_cublas_detail as detail  # noqa: F401
from kernels.mlp import _fp8, _op
from kernels.mlp._gluon_kernel import empty_partial_sums, launch_kernel
from kernels.quantize import dy_scale
from kernels.registry import Unavailable

DTYPES = torch.bfloat16, torch.float16
INPUT_IN_FP8 = True
RUNS = ("^_mlp_gluon_kernel",)
unavailable = partial(hopper_unavailable, "mlp")


def fc_and_gelu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, h: Tensor, a: Tensor) -> None:
    launch_kernel(x, w_fc, h, a, bias=b_fc)


def proj_and_gelu_backward(dy: Tensor, w_proj: Tensor, h: Tensor, a: Tensor, dh: Tensor, sums: bool) -> Tensor | None:
    partial_sums = empty_partial_sums(*h.shape, h.device) if sums else None
    launch_kernel(dy, w_proj, h, a, dh=dh, partial=partial_sums)
    return partial_sums


def fc_and_gelu_in_fp8(
    x: Tensor, w: Tensor, w_unit: Tensor, bias: Tensor | None, a: Tensor, dtype: torch.dtype
) -> Tensor:
    h = x.new_empty(len(x), len(w), dtype=dtype)
    launch_kernel(x, w, h, a, bias=bias, x_scale=X_SCALE, w_unit=w_unit)
    return h


def proj_and_gelu_backward_in_fp8(
    dy: Tensor, w: Tensor, w_unit: Tensor, h: Tensor, a: Tensor, dh: Tensor, dh_columns: Tensor, sums: bool
) -> Tensor | None:
    partial_sums, scale = empty_partial_sums(*h.shape, h.device) if sums else None, dy_scale(len(h))
    launch_kernel(dy, w, h, a, dh=dh, dh_columns=dh_columns, partial=partial_sums, x_scale=scale, w_unit=w_unit)
    return partial_sums


unquantized_mlp = _op.define_mlp("mlp_gluon", fc_and_gelu, proj_and_gelu_backward)
mlp_in_fp8 = _fp8.define_mlp("mlp_gluon_fp8", fc_and_gelu_in_fp8, proj_and_gelu_backward_in_fp8)


def refusal(x: Tensor, w_fc: Tensor, *rest: object, fp8: bool = False) -> str | None:
    """Return what the kernel takes instead of these dtypes or widths, or None if it takes them."""
    F, C = w_fc.shape
    multiple = 16 if fp8 else 8  # TMA needs rows of a multiple of 16 bytes
    if x.dtype not in DTYPES:
        return f"bfloat16 or float16, not {x.dtype}"
    if w_fc.dtype != x.dtype:
        return f"x and w_fc in one dtype, not in {x.dtype} and {w_fc.dtype}"
    if C % multiple or F % multiple:
        return f"widths that are multiples of {multiple}, not {C} and {F}"
    return None


def mlp(
    x: Tensor | InFp8, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, fp8: bool = False
) -> Tensor:
    if reason := refusal(x, w_fc, fp8=fp8):
        raise Unavailable(f"mlp=gluon takes {reason}: choose kernels.mlp=triton")
    if fp8:
        return mlp_in_fp8(x, w_fc, b_fc, w_proj, b_proj)
    return unquantized_mlp(x, w_fc, b_fc, w_proj, b_proj, save_h=True)
