"""The gated MLP of triton.py for Hopper, in Gluon, Triton's lower-level dialect, which gives warps different roles.

_gluon_kernel.py has the kernels and their method: two matmuls with SwiGLU and its derivative in their epilogues, which
run during the matmul of the next tile. cuBLAS computes the four other matmuls (kernels/mlp/_op.py). It has no fp8.
"""

from functools import partial

import torch
from torch import Tensor

from kernels.glu._gluon_kernel import empty_partial_sums, launch_backward, launch_forward
from kernels.gpu import hopper_unavailable
from kernels.gpu import triton_and_cublas_detail as detail  # noqa: F401
from kernels.mlp import _op
from kernels.registry import Unavailable

DTYPES = torch.bfloat16, torch.float16
RUNS = "^_glu_fwd_gluon_kernel", "^_glu_bwd_gluon_kernel"
FAMILY = "_glu_"
unavailable = partial(hopper_unavailable, "glu")


def proj_and_glu_backward(dy: Tensor, w_proj: Tensor, h: Tensor, a: Tensor, dh: Tensor, sums: bool) -> Tensor | None:
    partial_sums = empty_partial_sums(*a.shape, h.device) if sums else None
    launch_backward(dy, w_proj, h, a, dh, partial_sums)
    return partial_sums


unquantized_glu = _op.define_mlp("glu_gluon", launch_forward, proj_and_glu_backward)


def refusal(x: Tensor, w_fc: Tensor, *rest: object, fp8: bool = False) -> str | None:
    """Return what the kernels take instead of these dtypes or widths, or None if they take them."""
    rows, C = w_fc.shape
    if x.dtype not in DTYPES:
        return f"bfloat16 or float16, not {x.dtype}"
    if w_fc.dtype != x.dtype:
        return f"x and w_fc in one dtype, not in {x.dtype} and {w_fc.dtype}"
    if C % 8 or rows % 16:  # TMA needs rows of a multiple of 16 bytes
        return f"widths that are multiples of 8, not {C} and {rows // 2}"
    return None


def glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    if reason := refusal(x, w_fc):
        raise Unavailable(f"glu=gluon takes {reason}: choose kernels.glu=triton")
    return unquantized_glu(x, w_fc, b_fc, w_proj, b_proj, save_h=True)
