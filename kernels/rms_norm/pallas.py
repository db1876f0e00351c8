"""RMSNorm in Pallas, JAX's language for kernels (https://docs.jax.dev/en/latest/pallas/), with the addition fused.

The method and the bytes are those of kernels/norm/triton.py: 4 passes over (N, C) forward and 4 backward, so a copy of
these bytes is the floor. A kernel in Pallas is a function of references to arrays. load() and store() move a tile of
rows, with a mask, and what lies between is jax.numpy:

    forward   a program adds and normalises about 4096 numbers: 4 rows of 768
    backward  8 programs of 4 warps fill a multiprocessor. Each takes a row at a time, and sums its part of dweight in
              registers, in fp32. XLA adds the programs' sums

Pallas has two compilers for a GPU, and this file takes Triton's, which is a part of XLA. It has masks, so any width
will do. JAX 0.11 and 0.12 still have it, but say that a later version will not. The other one, Mosaic GPU, refuses a
row whose width is not a multiple of 128, such as SmolLM2's 576. Unlike in kernels/norm/triton.py, the loads of the next
row do not start early: Pallas cannot ask Triton for that. So more programs share a multiprocessor.

Without a GPU, PyTorch's Triton compiled for Hopper what JAX 0.10.2 hands to XLA: a thread has at most 64 registers, and
moves 16 bytes at once if C is a multiple of 8. A call costs what a call of kernels/xla.py costs, and has its limits: no
CUDA graph and no torch.compile. On a CPU, Pallas's interpreter runs the kernels, slowly.
"""

import functools
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kernels import xla
from kernels.direct import custom_op
from kernels.gpu import gpu_unavailable, multiprocessors, package_unavailable
from kernels.norm._op import check_rows
from kernels.norm._triton_backward import backward, empty_norm_gradients, setup_context
from kernels.norm.triton import call_by_rows, empty_outputs
from kernels.xla import RUNTIME  # noqa: F401

RUNS = "pallas_rms_norm_fwd", "pallas_rms_norm_bwd"
FAMILY = "pallas_rms_norm_"


def unavailable(device: torch.device) -> str | None:
    missing = xla.unavailable(device)
    missing = missing or package_unavailable("jax>=0.10,<0.13", "jax.experimental.pallas.triton.CompilerParams")
    return missing or (gpu_unavailable(device) if device.type == "cuda" else None)


def detail(**inputs: Any) -> str:
    on_cpu = any(isinstance(value, Tensor) and value.device.type == "cpu" for value in inputs.values())
    return f"jax {version('jax')}, XLA {version('jaxlib')}{', interpreted' if on_cpu else ''}"


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) to y, the new stream, an empty mean and rstd. Without a residual, the stream is empty.

    There is no bias.
    """
    from kernels.rms_norm import _pallas

    options = {"eps": eps, "interpret": not x.is_cuda}
    y, stream, rstd = xla.compute("rms_norm", _pallas.forward, x, residual, weight, **options)
    return y, x.new_empty(0) if stream is None else stream, rstd.new_empty(0), rstd


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
    """Return dx, dresidual, dweight and an empty dbias, as launch_backward() of _triton_backward.py does."""
    from kernels.rms_norm import _pallas

    options = {"multiprocessors": multiprocessors(stream.device), "interpret": not stream.is_cuda}
    options["x_dtype"] = str(x_dtype).removeprefix("torch.")
    arguments = stream, weight, rstd, dy, dstream
    dx, dresidual, dweight = xla.compute("rms_norm", _pallas.backward, *arguments, **options)
    absent = stream.new_empty(0, dtype=stream_dtype)
    return dx, absent if dresidual is None else dresidual, dweight, weight.new_empty(0)


norm_bwd = custom_op("hotswap::pallas_rms_norm_bwd", launch_backward, empty_norm_gradients)
empty = functools.partial(empty_outputs, centred=False)
autograd = functools.partial(backward, operator=norm_bwd), setup_context
rms_norm_fwd = custom_op("hotswap::pallas_rms_norm_fwd", run_forward, empty, *autograd)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, ...]:
    xla.refuse_capture("rms_norm", "pallas", x)
    check_rows("rms_norm", x, residual, weight, impl="pallas")
    return call_by_rows(rms_norm_fwd, x, residual, weight, None, eps)
