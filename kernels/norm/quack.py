"""QuACK's LayerNorm, of CuTe-DSL kernels (https://github.com/Dao-AILab/quack), with the addition fused in both ways.

Its layernorm_fwd and layernorm_bwd take no residual, but the operators below them do: its RMSNorm's, told that they are
a LayerNorm. They move triton.py's bytes, and keep what it keeps. The forward normalises the sum before it is rounded to
the stream's dtype, the backward starts from the rounded one.
"""

import functools
from importlib.metadata import version

import torch
from torch import Tensor

from kernels.direct import direct
from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.norm.triton import backward, gradients, outputs, setup_context
from kernels.registry import Unavailable

RUNS = ("(?i)quack|rmsnorm",)


def unavailable(device: torch.device) -> str | None:
    # before layernorm_bwd, of 0.6.2, the operator below it knew no LayerNorm
    missing = package_unavailable("quack-kernels[cu13]>=0.6.2", "quack.rmsnorm.layernorm_bwd")
    return missing or gpu_unavailable(device, (9, 0))


def detail(**inputs) -> str:
    return f"quack-kernels {version('quack-kernels')}, cutlass-dsl {version('nvidia-cutlass-dsl')}"


@torch.library.custom_op("hotswap::quack_norm_fwd", mutates_args=())
def norm_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual (N, C) -> y (N, C), the new stream (N, C; empty without a residual, it is x), mean and rstd (N,)."""
    from quack.rmsnorm import _rmsnorm_fwd

    y, stream, mean, rstd = outputs(x, residual, weight, bias, eps)
    out = None if residual is None else stream
    _rmsnorm_fwd(x, weight, y, bias, rstd, mean, residual, out, eps, is_layernorm=True)
    return y, stream, mean, rstd


norm_fwd.register_fake(outputs)


@torch.library.custom_op("hotswap::quack_norm_bwd", mutates_args=())
def norm_bwd(
    dy: Tensor,
    dstream: Tensor | None,
    stream: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dtype: torch.dtype,
    stream_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx in x_dtype, dresidual in stream_dtype (empty where that is the same), dweight, dbias (empty without one)."""
    from quack.rmsnorm import _rmsnorm_bwd
    from quack.rmsnorm_config import get_sm_count

    dx, dresidual, _, dbias = gradients(dy, dstream, stream, weight, bias, mean, rstd, x_dtype, stream_dtype)
    programs = get_sm_count(stream.shape[1], stream.device)
    partial = stream.new_empty(2, programs, stream.shape[1], dtype=torch.float32)
    _rmsnorm_bwd(
        stream,
        weight,
        dy.contiguous(),
        rstd,
        dx,
        partial[0],
        None if bias is None else partial[1],
        None if dstream is None else dstream.contiguous(),
        dresidual if x_dtype != stream_dtype else None,
        mean=mean,
        is_layernorm=True,
    )
    dweight = partial[0].sum(0).to(weight.dtype)
    return dx, dresidual, dweight, dbias if bias is None else partial[1].sum(0).to(weight.dtype)


norm_bwd.register_fake(gradients)
norm_fwd = direct(norm_fwd, functools.partial(backward, norm_bwd=direct(norm_bwd)), setup_context)


def norm(x, residual, weight, bias, eps=1e-5):
    C = x.shape[-1]
    if C % 2 and 2 in (x.element_size(), weight.element_size()):  # cp.async copies 4 bytes or more
        raise Unavailable(f"norm=quack takes even widths in 16 bits, and this is {C}: choose kernels.norm=eager")
    flat = None if residual is None else residual.reshape(-1, C).contiguous()
    y, stream, _, _ = norm_fwd(x.reshape(-1, C).contiguous(), flat, weight, bias, eps)
    return y.view(x.shape), x if residual is None else stream.view(x.shape)
