"""What kernels ask of a machine."""

import functools
import importlib
import os

import torch
import triton

from kernels.registry import Unavailable
from kernels.tuned import files, read

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gpu_unavailable(device: torch.device, capability: tuple[int, int] = (8, 0)) -> str | None:
    """Why `device` is no NVIDIA GPU of this compute capability or newer, or None."""
    needed = "compute capability {}.{} or newer".format(*capability)
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU of {needed}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= capability else f"it needs a GPU of {needed}, and this one has {major}.{minor}"


def triton_unavailable(device: torch.device) -> str | None:
    """Why a Triton kernel cannot run on `device`, or None. On a CPU Triton's interpreter can, slowly, for tests."""
    if device.type == "cuda":
        return gpu_unavailable(device)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"{gpu_unavailable(device)}; for a trial on a CPU set TRITON_INTERPRET=1"


def package_unavailable(package: str, symbol: str) -> str | None:
    """Why `symbol`, "module.name", cannot be had, or None. `package` is what pip installs."""
    module, _, name = symbol.rpartition(".")
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as why:
        return f"it needs {package} ({why}): pip install '{package}'"
    return None


def triton_detail(**inputs) -> str:
    """Triton's version, and whether its launch parameters may be this user's own: tuned.py."""
    mine, _ = files(next(iter(inputs.values())).device)
    tuned = any(not name.startswith("attention ") for name in read(mine))  # those are attn=auto's choices
    notes = {"interpreted": os.environ.get("TRITON_INTERPRET") == "1", "tuned here": tuned}
    return ", ".join([f"triton {triton.__version__}", *(note for note, holds in notes.items() if holds)])


def bind_context() -> None:
    """Make the GPU's context this thread's, as TMA descriptors want it and any call of CUDA's runtime does.

    Autograd has threads of its own, and a backward that computes something again may begin in one with such a kernel.
    """
    if torch.cuda.is_initialized():  # else it is Triton's interpreter
        torch.cuda.is_current_stream_capturing()  # 1 us, and allowed in a CUDA graph


def check_dtypes(op: str, *tensors: torch.Tensor | None) -> None:
    """Unavailable: one of them is of a dtype that the Triton kernels do not take, or not here."""
    for dtype in {tensor.dtype for tensor in tensors if tensor is not None}:
        if dtype not in DTYPES:
            raise Unavailable(f"{op}=triton takes float32, bfloat16 and float16, and not {dtype}")
        if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
            raise Unavailable(f"{op}=triton: Triton's interpreter computes bfloat16 wrongly; try fp32")


@functools.lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors: 132 on an H200. A CPU counts as 2."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.lru_cache
def has_tma(device: torch.device) -> bool:
    """Whether it has Hopper's engine for copying tiles, and 227 KB of shared memory for them: 12.0 has 99."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
