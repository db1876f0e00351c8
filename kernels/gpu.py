"""What a machine offers to kernels: a GPU, packages, Triton, dtypes, multiprocessors and TMA."""

import functools
import importlib
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import triton

from common.terminal import one_line
from kernels.names import override_key
from kernels.registry import Unavailable
from kernels.tuned import is_choice, read_table, table_paths, tables_in_use

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETER_ROUNDS_TO_FP8 = False  # a test that mends the interpreter sets it
SHARED_BYTES = 227 * 1024  # of a multiprocessor with compute capability 9.0
# What the import of a package raises that is missing, for another PyTorch, or has a broken library
IMPORT_ERRORS = ImportError, AttributeError, RuntimeError, OSError


def gpu_unavailable(device: torch.device, capability: tuple[int, int] = (8, 0)) -> str | None:
    """Return why `device` is not an NVIDIA GPU of at least this compute capability, or None if it is one."""
    needed = "compute capability {}.{} or newer".format(*capability)
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU of {needed}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= capability else f"it needs a GPU of {needed}, and this one has {major}.{minor}"


def triton_unavailable(device: torch.device) -> str | None:
    """Return why a Triton kernel cannot run on `device`, or None if it can.

    On a CPU, Triton's interpreter runs it if TRITON_INTERPRET=1. The interpreter is slow, and is meant for tests.
    """
    if device.type == "cuda":
        return gpu_unavailable(device)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"{gpu_unavailable(device)}; for a trial on a CPU set TRITON_INTERPRET=1"


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def hopper_unavailable(op: str, device: torch.device, impl: str = "triton") -> str | None:
    """Return why a kernel for Hopper cannot run on `device`, or None if it can. `impl` is what can run elsewhere."""
    if is_hopper(device):
        return None
    return f"it needs a Hopper GPU (compute capability 9.0): choose {override_key(op)}={impl}"


def package_unavailable(package: str, symbol: str) -> str | None:
    """Return why `symbol`, written "module.name", cannot be imported, or None if it can.

    `package` is the package that provides the symbol, as in `pip install`.
    """
    module, _, name = symbol.rpartition(".")
    try:
        getattr(importlib.import_module(module), name)
    except IMPORT_ERRORS as error:
        return f"it needs {package} ({one_line(error)}): pip install '{package}'"
    return None


def triton_detail(**inputs: Any) -> str:
    """Return Triton's version and notes about the run, in one line: "triton 3.6.0, tuned here".

    The notes are "interpreted" for Triton's interpreter, "tuned here" if the user's own table has launch parameters,
    and "tuned on h200" if the repo's table is of another GPU (see tuned.py). The first of `inputs` is a tensor on the
    device.
    """
    device = next(iter(inputs.values())).device
    user_table, repo_table = tables_in_use(device)
    notes = [f"triton {triton.__version__}"]
    if os.environ.get("TRITON_INTERPRET") == "1":
        notes.append("interpreted")
    if any(not is_choice(name) for name in read_table(user_table)):
        notes.append("tuned here")
    if repo_table not in table_paths(device):
        notes.append(f"tuned on {repo_table.stem}")
    return ", ".join(notes)


def triton_and_cublas_detail(fp8: bool = False, **inputs: Any) -> str:
    """Return triton_detail() of a backend whose other matmuls are cuBLAS's: "triton 3.6.0, fp8, cuBLAS matmuls"."""
    return f"{triton_detail(**inputs)}, {'fp8, ' if fp8 else ''}cuBLAS matmuls"


def align(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor as TMA needs it: contiguous, at a multiple of 16 bytes. None stays None.

    is_contiguous() is not enough: it ignores the stride of a single row, and TMA does not.
    """
    if tensor is None:
        return None
    strides = tuple(math.prod(tensor.shape[axis:]) for axis in range(1, tensor.dim() + 1))
    if tensor.stride() == strides and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def make_context_current() -> None:
    """Make the GPU's context current in this thread, because creating a TMA descriptor needs a current context.

    Any call of the CUDA runtime does this. But autograd runs a backward in a thread of its own, and if the backward
    recomputes something, its first CUDA call in that thread may be a kernel that uses TMA.
    """
    if torch.cuda.is_initialized():  # not initialized in Triton's interpreter
        torch.cuda.is_current_stream_capturing()  # takes 1 us, and is allowed in a CUDA graph


def check_dtypes(op: str, *tensors: torch.Tensor | None, fp8: bool = False, impl: str = "triton") -> None:
    """Check that the Triton kernels of `op` support the dtypes of `tensors`, and with `fp8` that they can round to fp8.

    They belong to the backend `impl`. Raises Unavailable if they cannot, or if Triton's interpreter runs them and a
    dtype is bfloat16.
    """
    if fp8 and os.environ.get("TRITON_INTERPRET") == "1" and not INTERPRETER_ROUNDS_TO_FP8:
        raise Unavailable(f"{op}={impl} in Triton's interpreter cannot round to fp8: choose kernels.{op}=eager")
    if reason := unsupported_dtype(DTYPES, *tensors):
        raise Unavailable(f"{op}={impl} takes {reason}: choose one of them")
    in_bf16 = any(tensor is not None and tensor.dtype == torch.bfloat16 for tensor in tensors)
    if in_bf16 and os.environ.get("TRITON_INTERPRET") == "1":
        remedy = f"choose fp32, or {override_key(op)}=eager"
        raise Unavailable(f"{op}={impl} in Triton's interpreter gives wrong results in bfloat16: {remedy}")


def unsupported_dtype(dtypes: Sequence[torch.dtype], *tensors: torch.Tensor | None) -> str | None:
    """Return what a kernel takes instead of a tensor's dtype: "bfloat16 and float16, not torch.float64".

    None if all tensors have one of `dtypes`.
    """
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in dtypes:
            *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
            return f"{', '.join(names)} and {last}, not {tensor.dtype}"
    return None


def refused_widths(x: torch.Tensor, *widths: int) -> str | None:
    """Return what matmuls that load by TMA take instead of these widths or x's dtype, or None if they take them."""
    if any(width % 8 for width in widths):
        return f"widths that are multiples of 8, not {' and '.join(map(str, widths))}"
    if x.dtype == torch.float32:  # on a CPU the tests replace the kernels
        return "bfloat16 and float16, because its matmuls round float32 to TF32" if x.is_cuda else None
    return unsupported_dtype((torch.bfloat16, torch.float16), x)


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors: 132 on an H200. Return 2 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.lru_cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use: 227 KB on an H200. Return the same for a CPU."""
    if device.type != "cuda":
        return SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.lru_cache
def has_tma(device: torch.device) -> bool:
    """Return whether `device` has TMA, the copy engine for tiles, and 227 KB of shared memory for the tiles.

    A GPU of compute capability 12.0 has only 99 KB of shared memory.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
