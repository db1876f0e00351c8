"""LayerNorm in Helion (https://github.com/pytorch/helion), with the addition fused forward and backward.

Helion compiles Python over tiles of tensors to Triton kernels. It writes offsets, masks and launches; a config chooses
the sizes of the tiles and the number of warps. So the two kernels in _helion.py need half the lines of triton.py's for
the same bytes. The configs here are triton.py's choices before tuning. Without a config, Helion would search for
minutes at the first call; to tune by hand, call helion.kernel(norm_fwd).autotune(arguments), and copy what it prints.
"""

import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu import check_dtypes, multiprocessors, package_unavailable, triton_detail, triton_unavailable
from kernels.norm._op import define_norm
from kernels.norm._triton_backward import empty_norm_gradients
from kernels.norm.triton import empty_outputs

RUNS = "helion_norm_fwd", "helion_norm_bwd"
FAMILY = "_norm_"
PROGRAM_ELEMENTS = 4096  # of the forward: 16 elements a thread
PROGRAMS = 4  # of the backward, for each multiprocessor


def unavailable(device: torch.device) -> str | None:
    return package_unavailable("helion==1.5.0", "helion.language.register_block_size") or triton_unavailable(device)


def detail(**inputs: Any) -> str:
    return f"helion {version('helion')}, {triton_detail(**inputs)}"


def forward_kernel(x: Tensor) -> Callable:
    """Return the kernel for x (N, C)."""
    from kernels.norm import _helion

    width = triton.next_power_of_2(x.shape[1])
    # For a single row, Helion 1.5.0 omits the mask of rows. A program with more rows would overwrite the results
    rows = 1 if len(x) == 1 else max(1, PROGRAM_ELEMENTS // width)
    return _helion.kernel(_helion.norm_fwd, (rows,), num_warps=min(16, max(1, rows * width // 512)))


def backward_kernel(stream: Tensor) -> tuple[Callable, int]:
    """Return the kernel for the stream (N, C), and the number of its programs."""
    from kernels.norm import _helion

    N, width = len(stream), triton.next_power_of_2(stream.shape[1])
    block = triton.next_power_of_2(triton.cdiv(N, PROGRAMS * multiprocessors(stream.device)))
    rows = min(block, 2 if width <= 4096 else 1)
    kernel = _helion.kernel(_helion.norm_bwd, (block, rows), num_warps=min(16, max(1, width // 256)))
    return kernel, triton.cdiv(N, block)


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) to y, the new stream, mean and rstd. Without a residual, the stream is empty.

    Without `centred` it is RMSNorm, and mean is empty.
    """
    y, stream, mean, rstd = empty_outputs(x, residual, weight, centred=centred)
    forward_kernel(x)(x, residual, weight, bias, eps, y, stream, mean if centred else None, rstd)
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
    kernel, programs = backward_kernel(stream)
    dx, dresidual, _, dbias = empty_norm_gradients(stream, weight, bias, x_dtype, stream_dtype)
    partial = stream.new_empty(2, programs, stream.shape[1], dtype=torch.float32)
    second = dresidual if x_dtype != stream_dtype else None  # otherwise dresidual is dx
    # Helion takes int32 offsets for a tensor of up to 2^31 elements, whatever its strides are
    dy, dstream = dy.contiguous(), None if dstream is None else dstream.contiguous()
    mean = mean if len(mean) == len(stream) else None  # RMSNorm
    kernel(dy, dstream, stream, weight, mean, rstd, dx, second, partial[0], None if bias is None else partial[1])
    dweight = partial[0].sum(0).to(weight.dtype)
    return dx, dresidual, dweight, dbias if bias is None else partial[1].sum(0).to(weight.dtype)


norm, rms_norm = define_norm("helion", run_forward, launch_backward, functools.partial(check_dtypes, impl="helion"))
