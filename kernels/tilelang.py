"""TileLang (https://github.com/tile-ai/tilelang): what the backends `tilelang` of all ops share.

A kernel in TileLang is Python over tiles in shared memory and in registers, like one in Triton. But the program chooses
where a tile lies, and may say which thread holds which of its numbers. TileLang writes CUDA C++ from it. nvcc, a part
of the CUDA toolkit, compiles that in 3 s a kernel, and ~/.tilelang keeps the result. There is no interpreter for a CPU.

A kernel is compiled for the widths and dtypes of its tensors; the number of rows is free. TileLang passes the current
stream of PyTorch to the launch, so a CUDA graph can hold it.
"""

import functools
import logging
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.gpu import gpu_unavailable, make_context_current, multiprocessors, package_unavailable

PACKAGE = "tilelang==0.1.15"
PROGRAMS = 4  # of the sum of rows, for each multiprocessor
THREADS = 256  # of a program that sums rows
STEPS = 4  # rows that a thread loads at once

logging.getLogger("tilelang.jit.kernel").setLevel(logging.WARNING)  # it says of each kernel that it compiles


def unavailable(device: torch.device) -> str | None:
    # before the import, which raises RuntimeError with a newer apache-tvm-ffi
    missing = ffi_unavailable() or package_unavailable(PACKAGE, "tilelang.language.annotate_consumer_reg_alloc")
    return missing or gpu_unavailable(device) or compiler_unavailable()


def ffi_unavailable() -> str | None:
    """Return which apache-tvm-ffi TileLang needs instead of the installed one, or None if that fits."""
    try:
        version("tilelang")
        found = version("apache-tvm-ffi")
    except PackageNotFoundError:
        return None
    if (0, 1, 11) <= tuple(map(int, re.findall(r"\d+", found)[:3])) < (0, 1, 13):
        return None
    return f"it needs apache-tvm-ffi 0.1.11 or 0.1.12, not {found}: pip install 'apache-tvm-ffi<0.1.13'"


@functools.cache
def compiler_unavailable() -> str | None:
    """Return why TileLang finds no CUDA compiler, or None if it finds one."""
    from tilelang.env import env

    if env.CUDA_HOME and (Path(env.CUDA_HOME) / "bin" / "nvcc").exists():
        return None
    return "it needs nvcc, CUDA's compiler: set CUDA_HOME to the CUDA toolkit, or pip install 'tilelang[nvcc]==0.1.15'"


def detail(**inputs: Any) -> str:
    return f"tilelang {version('tilelang')}"


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in TileLang: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def launch(kernel: Callable, /, **arguments: Any) -> None:
    """Launch a kernel in TileLang on PyTorch's current stream.

    The arguments are in the order of the kernel's parameters, because TileLang takes no names. None stays None: the
    kernels accept it for an unused tensor.
    """
    make_context_current()
    # DLPack, by which TileLang takes tensors, may refuse one that needs a gradient
    kernel(*(value.detach() if isinstance(value, Tensor) else value for value in arguments.values()))


def vector_width(C: int, *tensors: Tensor) -> int:
    """Return how many adjacent elements of a row a thread loads at once.

    It is a divisor of C, and at most 16 bytes of the widest dtype.
    """
    most = 16 // max(tensor.element_size() for tensor in tensors)
    return next(count for count in (8, 4, 2, 1) if count <= most and C % count == 0)


class SumTile(NamedTuple):
    """A tile of a sum of rows: `lanes` threads load a row, `vec` adjacent numbers each."""

    vec: int
    lanes: int
    threads: int = THREADS

    @property
    def rows(self) -> int:
        return STEPS * self.threads // self.lanes

    @property
    def columns(self) -> int:
        return self.lanes * self.vec


def sum_tile(x: Tensor) -> SumTile:
    """Return the tile for the sum of the rows of x. A tile of few rows has more columns: dW has at most 64 parts."""
    groups = min(32, triton.next_power_of_2(triton.cdiv(len(x), STEPS)))
    return SumTile(vec=vector_width(x.shape[1], x), lanes=THREADS // groups)


def add_partial_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the rows of `partial` (N, C) fp32, contiguous: (C,) in `dtype`, added in a fixed order."""
    out = torch.empty(partial.shape[1], dtype=dtype, device=partial.device)
    launch_sum(partial, out[None])
    return out


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of the rows of x (N, C), contiguous: (C,) in x's dtype, summed in fp32 in a fixed order."""
    (N, C), tile = x.shape, sum_tile(x)
    most = PROGRAMS * multiprocessors(x.device) // triton.cdiv(C, tile.columns)
    programs = max(1, min(triton.cdiv(N, tile.rows), most))
    partial = torch.empty(programs, C, dtype=torch.float32, device=x.device)
    launch_sum(x, partial)
    return add_partial_sums(partial, x.dtype)


def launch_sum(x: Tensor, out: Tensor) -> None:
    """Write the sum of the rows of each program into `out` (programs, C)."""
    from kernels._tilelang_sums import sum_rows as sum_kernel

    kernel = sum_kernel(x.shape[1], sum_tile(x), dtype_name(x), dtype_name(out))
    launch(kernel, x=x, out=out)
