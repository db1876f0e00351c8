"""QuACK's LayerNorm in CuTe DSL (https://github.com/Dao-AILab/quack), with the addition fused forward and backward.

QuACK's layernorm_fwd and layernorm_bwd accept no residual. The RMSNorm operators below them accept a residual, and
compute a LayerNorm if is_layernorm=True, so this backend calls those operators. They read and write as many bytes as
triton.py, and autograd saves the same tensors as for triton.py. The forward normalises x + residual before rounding
the sum to the dtype of the stream. The backward starts from the rounded sum.
"""

import torch
from torch import Tensor

from kernels.gpu import DTYPES, gpu_unavailable, package_unavailable, unsupported_dtype
from kernels.norm._op import define_norm
from kernels.norm._triton_backward import empty_norm_gradients
from kernels.norm.triton import empty_outputs
from kernels.quack import PACKAGE, detail  # noqa: F401
from kernels.registry import Unavailable

RUNS = ("(?i)quack|rmsnorm",)
FAMILY = "(?i)quack|rmsnorm"


def unavailable(device: torch.device) -> str | None:
    # QuACK 0.6.2 added layernorm_bwd; before that version its backward operator could not compute a LayerNorm
    missing = package_unavailable(PACKAGE, "quack.rmsnorm.layernorm_bwd")
    return missing or gpu_unavailable(device, (9, 0))


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) to y, the new stream, mean and rstd. Without a residual, the stream is empty.

    Without `centred` it is RMSNorm, and mean is empty.
    """
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


def check_widths(op: str, x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """Raise Unavailable if a dtype or the width is none of QuACK's: cp.async copies at least 4 bytes."""
    reason = unsupported_dtype(DTYPES, x, residual, weight)
    if (C := x.shape[-1]) % 2 and 2 in (x.element_size(), weight.element_size()):
        reason = f"an even width for 16-bit dtypes, not {C}"
    if reason:
        raise Unavailable(f"{op}=quack takes {reason}: choose kernels.{op}=eager")


norm, rms_norm = define_norm("quack", run_forward, launch_backward, check_widths)
