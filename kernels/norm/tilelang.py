"""LayerNorm in TileLang (https://github.com/tile-ai/tilelang), with the addition fused forward and backward.

The method, the bytes and the roof are those of triton.py: 4 passes over (N, C) forward, 4 backward, and a copy of these
bytes is the floor. What differs is who holds a row. In Triton a row is padded to a power of two, and a program
of several warps may share it. Here the program says which thread holds which numbers (row_layout() in _tilelang.py):

    forward   a warp holds a row of up to 2048 numbers, in vectors of 16 bytes. For C = 768 these are three a thread,
              and none is masked. The two sums of a row are shuffles within the warp, without a barrier. ptxas gives a
              thread 63 registers in bf16, so 32 rows are on their way at a time in a multiprocessor
    backward  a program loops over its rows, four at a time for C = 768. A thread always has the same columns, so it
              sums dy xhat and dy in registers. At the end the warps of a program add their sums in shared memory,
              and it writes them once in fp32. A second kernel adds the sums of all programs in a fixed order, so every
              run gives the same bits. A thread has 128 registers: 16 rows are on their way

A row of more than 2048 numbers, in the backward of more than 1024, belongs to several warps, which meet in shared
memory. kernels/tilelang.py says what a compilation needs.
"""

import functools
from collections.abc import Callable
from types import ModuleType

import torch
import triton
from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import multiprocessors
from kernels.norm._triton_backward import backward, empty_norm_gradients, setup_context
from kernels.norm.triton import call_by_rows, empty_outputs
from kernels.registry import Unavailable
from kernels.tilelang import add_partial_sums, aligned, check_dtypes, detail, dtype_name, unavailable, vector  # noqa: F401

RUNS = "tilelang_norm_fwd", "tilelang_norm_bwd"
FAMILY = "tilelang_norm_|tilelang_sum_rows"
MAX_WIDTH = 16384  # a whole row must fit into the registers of one program
THREADS = 128  # of a program with narrow rows


def kernels() -> ModuleType:
    """Return _tilelang.py. Importing it imports TileLang."""
    from kernels.norm import _tilelang

    return _tilelang


def row_launch(C: int, vec: int, held: int) -> tuple[int, int]:
    """Return how many threads hold a row, each about `held` numbers or fewer, and how many rows a program has."""
    lanes = min(32, triton.next_power_of_2(triton.cdiv(C, vec)))
    lanes = max(lanes, triton.next_power_of_2(triton.cdiv(C, held)))
    return lanes, max(1, THREADS // lanes)


def backward_launch(C: int, vec: int, stream_bytes: int) -> tuple[int, int, int]:
    """Return the threads of a row, the rows of a program, and the programs of a multiprocessor.

    A thread with 24 numbers of a row needs 128 registers, so 16 warps fit; other widths and fp32 need up to 168.
    """
    lanes, rows = row_launch(C, vec, 32)
    few = triton.cdiv(C, lanes) <= 24 and stream_bytes == 2
    return lanes, rows, max(1, (512 if few else 384) // (lanes * rows))


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) to y, the new stream, mean and rstd. Without a residual, the stream is empty."""
    return run_forward(x, residual, weight, bias, eps, centred=True)


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what launch_forward() does. Without `centred` it is RMSNorm, and mean is empty."""
    C, (y, stream, mean, rstd) = x.shape[1], empty_outputs(x, residual, weight, centred=centred)
    x, residual, weight, bias = aligned(x), aligned(residual), aligned(weight), aligned(bias)
    has_residual, has_bias = residual is not None, bias is not None
    wide = residual if has_residual else x
    vec = vector(C, x, wide, weight)
    lanes, rows = row_launch(C, vec, 64)
    dtypes = dtype_name(x), dtype_name(wide), dtype_name(weight)
    kernel = kernels().norm_fwd(C, vec, lanes, rows, has_residual, has_bias, centred, *dtypes)
    kernel(x, residual, weight, bias, y, stream if has_residual else None, mean if centred else None, rstd, eps)
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
    N, C = stream.shape
    dx, dresidual, _, dbias = empty_norm_gradients(stream, weight, bias, x_dtype, stream_dtype)
    stream, weight, dy, dstream = aligned(stream), aligned(weight), aligned(dy), aligned(dstream)
    has_dresidual, centred = x_dtype != stream_dtype, len(mean) == N
    vec = vector(C, stream, weight, dx)
    lanes, rows, blocks = backward_launch(C, vec, stream.element_size())
    kernel = kernels().norm_bwd(
        *(C, vec, lanes, rows, blocks, dstream is not None, bias is not None, has_dresidual, centred),
        *(dtype_name(dx), dtype_name(stream), dtype_name(weight)),
    )
    programs = min(triton.cdiv(N, rows), blocks * multiprocessors(stream.device))
    partial = torch.empty(2, programs, C, dtype=torch.float32, device=stream.device)
    second = dresidual if has_dresidual else None  # otherwise dresidual is dx
    inputs = dy, dstream, stream, weight, mean if centred else None, rstd
    kernel(*inputs, dx, second, partial[0], None if bias is None else partial[1])
    dweight = add_partial_sums(partial[0], weight.dtype)
    return dx, dresidual, dweight, dbias if bias is None else add_partial_sums(partial[1], weight.dtype)


norm_bwd = custom_op("hotswap::tilelang_norm_bwd", launch_backward, empty_norm_gradients)
_backward = functools.partial(backward, norm_bwd=norm_bwd)
norm_fwd = custom_op("hotswap::tilelang_norm_fwd", launch_forward, empty_outputs, _backward, setup_context)


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
    """Call `op`, norm_fwd or one like it, with (N, C) tensors, and return y and the new stream in x's shape.

    Raises Unavailable if the rows are too wide or a dtype is not supported; `name` is the op in the message.
    """
    check_dtypes(name, x, residual, weight)
    C = x.shape[-1]
    if C > MAX_WIDTH:
        raise Unavailable(f"{name}=tilelang takes widths up to {MAX_WIDTH}, not {C}: choose kernels.{name}=eager")
    return call_by_rows(op, x, residual, weight, bias, eps)
