"""QuACK's LayerNorm in CuTe DSL (https://github.com/Dao-AILab/quack), with the addition fused forward and backward.

QuACK's layernorm_fwd and layernorm_bwd accept no residual. The RMSNorm operators below them accept a residual, and
compute a LayerNorm if is_layernorm=True, so this backend calls those operators. They read and write as many bytes as
triton.py, and autograd saves the same tensors as for triton.py. The forward normalises x + residual before rounding
the sum to the dtype of the stream. The backward starts from the rounded sum.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.norm._triton_backward import backward, empty_norm_gradients, setup_context
from kernels.norm.triton import call_by_rows, empty_outputs
from kernels.quack import detail  # noqa: F401
from kernels.registry import Unavailable

RUNS = ("(?i)quack|rmsnorm",)
FAMILY = "(?i)quack|rmsnorm"


def unavailable(device: torch.device) -> str | None:
    # QuACK 0.6.2 added layernorm_bwd; before that version its backward operator could not compute a LayerNorm
    missing = package_unavailable("quack-kernels[cu13]>=0.6.2", "quack.rmsnorm.layernorm_bwd")
    return missing or gpu_unavailable(device, (9, 0))


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) to y, the new stream, mean and rstd. Without a residual, the stream is empty."""
    return run_forward(x, residual, weight, bias, eps, centred=True)


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what launch_forward() does. Without `centred` it is RMSNorm, and mean is empty."""
    from quack.rmsnorm import _rmsnorm_fwd

    y, stream, mean, rstd = empty_outputs(x, residual, weight, centred=centred)
    out = None if residual is None else stream
    _rmsnorm_fwd(x, weight, y, bias, rstd, mean if centred else None, residual, out, eps, is_layernorm=centred)
    return y, stream, mean, rstd


def launch_backward(
    stream: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_dtype: torch.dtype,
    stream_dtype: torch.dtype,
    dy: Tensor,
    dstream: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx, dresidual, dweight and dbias, as launch_backward() of _triton_backward.py does."""
    from quack.rmsnorm import _rmsnorm_bwd
    from quack.rmsnorm_config import get_sm_count

    dx, dresidual, _, dbias = empty_norm_gradients(stream, weight, bias, x_dtype, stream_dtype)
    programs = get_sm_count(stream.shape[1], stream.device)
    partial = stream.new_empty(2, programs, stream.shape[1], dtype=torch.float32)
    second = dresidual if x_dtype != stream_dtype else None  # otherwise dresidual is dx
    dy, dstream = dy.contiguous(), None if dstream is None else dstream.contiguous()
    sums = partial[0], None if bias is None else partial[1]
    centred = len(mean) == len(stream)  # otherwise it is RMSNorm
    mean = mean if centred else None
    _rmsnorm_bwd(stream, weight, dy, rstd, dx, *sums, dstream, second, mean=mean, is_layernorm=centred)
    dweight = partial[0].sum(0).to(weight.dtype)
    return dx, dresidual, dweight, dbias if bias is None else partial[1].sum(0).to(weight.dtype)


norm_bwd = custom_op("hotswap::quack_norm_bwd", launch_backward, empty_norm_gradients)
_backward = functools.partial(backward, norm_bwd=norm_bwd)
norm_fwd = custom_op("hotswap::quack_norm_fwd", launch_forward, empty_outputs, _backward, setup_context)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    return apply_to_rows(norm_fwd, x, residual, weight, bias, eps)


def apply_to_rows(
    op: Callable,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    name: str = "norm",
) -> tuple[Tensor, ...]:
    """Call `op`, norm_fwd or one like it, with (N, C) tensors, and return y and the new stream in x's shape."""
    C = x.shape[-1]
    if C % 2 and 2 in (x.element_size(), weight.element_size()):  # cp.async copies at least 4 bytes
        raise Unavailable(f"{name}=quack needs an even width for 16-bit dtypes, not {C}: choose kernels.{name}=eager")
    return call_by_rows(op, x, residual, weight, bias, eps)
