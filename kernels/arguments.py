"""What every call of a backend passes through: registry.load() wraps the op's function in check_arguments().

So a kernel relies on its contract (TENSORS, ANY_STRIDES, conflict), and need not test it:

    shapes      A wrong shape raises ValueError. A kernel would read beyond the tensor, and give wrong numbers silently.
    strides     Only the tensors in ANY_STRIDES may have any strides. The others, a bias or the targets, are contiguous.
    autocast    Under torch.autocast, the ops of matmuls get tensors of its dtype, as PyTorch's own matmuls do. The
                kernels run without autocast, which would change the dtypes of the matmuls inside of an op.
    no rows     With an empty tensor, the result is reference()'s, because a GPU launches no grid of 0 programs.

A call costs the host 4 to 5 us more (measured alone, on one core of an AMD EPYC). It costs nothing in a CUDA graph or
under torch.compile.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.direct import in_autocast, without_autocast
from kernels.names import KernelError

AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # not float64, and not the fp8 of a cache


def check_arguments(op: str, contract: ModuleType, function: Callable) -> Callable:
    """Return the op's function with the checks above; `function` itself if the contract has no TENSORS.

    A call raises KernelError, a ValueError, that names the op, the argument, its shape and the contract's.
    """
    if not hasattr(contract, "TENSORS"):
        return function
    names = tuple(inspect.signature(contract.reference).parameters)
    tensors = [(name, dims.split(), name in contract.ANY_STRIDES) for name, dims in contract.TENSORS.items()]
    conflict = getattr(contract, "conflict", None)
    has_matmuls = contract.BOUND == "flops"

    @functools.wraps(function, updated=())  # a function of torch.compile() has attributes that it must not find here
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        sizes = {}  # of each dimension
        changed = empty = False
        for name, dims, any_strides in tensors:
            tensor = arguments.get(name)
            if tensor is None:
                continue
            shape = tensor.shape
            if not match_shape(shape, dims, sizes):
                raise KernelError(describe_wrong_shape(op, name, shape, dims, sizes))
            empty = empty or 0 in shape
            if not any_strides and not tensor.is_contiguous():
                arguments[name], changed = tensor.contiguous(), True
        if conflict and (reason := conflict(**arguments)):
            raise KernelError(f"{op}: {reason}: see kernels/{op}/__init__.py")
        if empty:
            arguments.pop("fp8", None)
            return contract.reference(**arguments)
        device = arguments[names[0]].device.type
        autocast = in_autocast(device)
        if not autocast and not changed:
            return function(*args, **kwargs)
        if autocast and has_matmuls:
            arguments = cast_floats(arguments, torch.get_autocast_dtype(device))
        # a backend may name its first arguments as it likes
        args = [arguments[name] for name in names[: len(args)]]
        kwargs = {name: arguments[name] for name in kwargs}
        with without_autocast(device):
            return function(*args, **kwargs)

    return call


def match_shape(shape: Sequence[int], dims: Sequence[str], sizes: dict[str, int | tuple[int, ...]]) -> bool:
    """Return whether a shape has these dimensions and agrees with `sizes`. Record its new dimensions in `sizes`.

    `dims` are names of dimensions, for example ["...", "C"]. The first may be `...`: any number of dimensions.
    """
    right = True
    if dims[0] == "...":
        leading = len(shape) - len(dims) + 1
        if leading < 0:
            return False
        right = sizes.setdefault("...", shape[:leading]) == shape[:leading]
        shape, dims = shape[leading:], dims[1:]
    if len(shape) != len(dims):
        return False
    for dim, size in zip(dims, shape, strict=True):
        if sizes.setdefault(dim, size) != size:
            right = False
    return right


def describe_wrong_shape(op: str, name: str, shape: Sequence[int], dims: Sequence[str], sizes: Mapping) -> str:
    expected = []
    for dim in dims:
        size = sizes.get(dim, dim)
        expected += size if isinstance(size, tuple) else [size]
    wanted = f"({', '.join(dims)})"
    if expected != dims:
        wanted += f" = ({', '.join(map(str, expected))}) to fit the arguments before it"
    return f"{op}: {name} has the shape {tuple(shape)}, and must have {wanted}: see kernels/{op}/__init__.py"


def cast_floats(arguments: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Return the arguments with their tensors in fp32, bf16 and fp16 cast to `dtype`."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.dtype in AUTOCAST_DTYPES else value
        for name, value in arguments.items()
    }
