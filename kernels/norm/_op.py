"""The operators and the autograd of a norm in another language: LayerNorm and RMSNorm with the same two kernels."""

import functools
from collections.abc import Callable

from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import DTYPES, unsupported_dtype
from kernels.norm._triton_backward import backward, empty_norm_gradients, setup_context
from kernels.norm.triton import MAX_WIDTH, call_by_rows, empty_outputs
from kernels.registry import Unavailable


def define_norm(
    name: str, run_forward: Callable, launch_backward: Callable, check: Callable
) -> tuple[Callable, Callable]:
    """Define the operators hotswap::NAME_norm_fwd, NAME_rms_norm_fwd and NAME_norm_bwd. Return norm() and rms_norm().

    run_forward(x, residual, weight, bias, eps, centred) does what launch_forward() of triton.py does, and
    launch_backward() what launch_backward() of _triton_backward.py does; both take contiguous rows. check(op, x,
    residual, weight) raises Unavailable if the kernels do not take these tensors.
    """

    def layer_norm_forward(
        x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return run_forward(x, residual, weight, bias, eps, centred=True)

    def rms_norm_forward(
        x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return run_forward(x, residual, weight, bias, eps, centred=False)

    norm_bwd = custom_op(f"hotswap::{name}_norm_bwd", launch_backward, empty_norm_gradients)
    autograd = functools.partial(backward, operator=norm_bwd), setup_context
    norm_fwd = custom_op(f"hotswap::{name}_norm_fwd", layer_norm_forward, empty_outputs, *autograd)
    empty = functools.partial(empty_outputs, centred=False)
    rms_norm_fwd = custom_op(f"hotswap::{name}_rms_norm_fwd", rms_norm_forward, empty, *autograd)

    def norm(
        x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
    ) -> tuple[Tensor, ...]:
        check("norm", x, residual, weight)
        return call_by_rows(norm_fwd, x, residual, weight, bias, eps)

    def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, ...]:
        check("rms_norm", x, residual, weight)
        return call_by_rows(rms_norm_fwd, x, residual, weight, None, eps)

    return norm, rms_norm


def check_rows(op: str, x: Tensor, residual: Tensor | None, weight: Tensor, *, impl: str) -> None:
    """Raise Unavailable if a dtype is not in DTYPES, or if the rows are too wide for the registers of one program."""
    reason = unsupported_dtype(DTYPES, x, residual, weight)
    if (C := x.shape[-1]) > MAX_WIDTH:
        reason = f"widths up to {MAX_WIDTH}, not {C}"
    if reason:
        raise Unavailable(f"{op}={impl} takes {reason}: choose kernels.{op}=eager")
