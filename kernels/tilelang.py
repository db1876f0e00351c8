"""TileLang (https://github.com/tile-ai/tilelang): what the backends `tilelang` of all ops share.

A kernel in TileLang is Python over tiles in shared memory and in registers, like one in Triton. But the program chooses
where a tile lies, and may say which thread holds which of its numbers. TileLang writes CUDA C++ from it, which nvcc
compiles: 3 s a kernel, once on a machine, because it keeps the results in ~/.tilelang. So TileLang needs a CUDA
toolkit, and there is no trial on a CPU.

A kernel is compiled for the widths and dtypes of its tensors; the number of rows is free. TileLang passes the current
stream of PyTorch to the launch, so a CUDA graph can hold it.
"""

import functools
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu import DTYPES, align, gpu_unavailable, multiprocessors, package_unavailable
from kernels.registry import Unavailable

PACKAGE = "tilelang==0.1.15"
PROGRAMS = 4  # of the sum of rows, for each multiprocessor


def unavailable(device: torch.device) -> str | None:
    # before the import, which raises RuntimeError with a newer apache-tvm-ffi
    missing = wrong_ffi() or package_unavailable(PACKAGE, "tilelang.language.annotate_consumer_reg_alloc")
    return missing or gpu_unavailable(device) or compiler_unavailable()


def wrong_ffi() -> str | None:
    """Return which apache-tvm-ffi TileLang needs instead of the installed one, or None if that fits."""
    try:
        found = version("tilelang") and version("apache-tvm-ffi")
    except PackageNotFoundError:
        return None
    if (0, 1, 11) <= tuple(map(int, found.split(".")[:3])) < (0, 1, 13):
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


def check_dtypes(op: str, *tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise Unavailable if the kernels of the op do not take the dtype of a tensor."""
    for dtype in {tensor.dtype for tensor in tensors if tensor is not None} - {*dtypes}:
        names = [str(each).removeprefix("torch.") for each in dtypes]
        taken = f"{', '.join(names[:-1])} and {names[-1]}"
        raise Unavailable(f"{op}=tilelang takes {taken}, not {dtype}: choose kernels.{op}=eager")


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in TileLang: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def aligned(tensor: Tensor | None) -> Tensor | None:
    """Return a (n, C) matrix or a (C,) vector as the kernels read it: contiguous, at a multiple of 16 bytes.

    Return None for None, which the kernels take for a tensor that they do not use. The result is detached, because
    DLPack, by which TileLang takes tensors, may refuse one that needs a gradient.
    """
    if tensor is None:
        return None
    tensor = tensor.detach()
    return align(tensor) if tensor.dim() == 2 else align(tensor[None])[0]


def vector(C: int, *tensors: Tensor) -> int:
    """Return how many neighbours of a row of C numbers a thread moves at once: at most 16 bytes of the widest dtype."""
    most = 16 // max(tensor.element_size() for tensor in tensors)
    return next(count for count in (8, 4, 2, 1) if count <= most and C % count == 0)


def sum_kernel() -> Callable:
    """Return the kernel of _tilelang_sums.py. Importing it imports TileLang."""
    from kernels._tilelang_sums import sum_rows

    return sum_rows


def add_partial_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the rows of `partial` (N, C) fp32, contiguous: (C,) in `dtype`, added in a fixed order."""
    out = torch.empty(partial.shape[1], dtype=dtype, device=partial.device)
    launch_sum(partial, out[None], 1)
    return out


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of the rows of x (N, C), contiguous: (C,) in x's dtype, summed in fp32 in a fixed order."""
    N, C = x.shape
    programs = max(1, min(triton.cdiv(N, 128), PROGRAMS * multiprocessors(x.device) // triton.cdiv(C, 64)))
    partial = torch.empty(programs, C, dtype=torch.float32, device=x.device)
    launch_sum(x, partial, programs)
    return add_partial_sums(partial, x.dtype)


def launch_sum(x: Tensor, out: Tensor, programs: int) -> None:
    """Write the sum of the rows of each program into `out` (programs, C)."""
    C = x.shape[1]
    sum_kernel()(C, vector(C, x, out), dtype_name(x), dtype_name(out))(x, out)
