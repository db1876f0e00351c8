"""The private parts of PyTorch that kernels/ uses, and why. Checked with torch 2.11 and 2.13.

tests/kernels/test_compat.py fails if one of them stops working or is no longer needed.
"""

from contextlib import AbstractContextManager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: F401  there is no public name for it
from torch.autograd import profiler
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # noqa: F401  there is no public name for it
    is_in_torch_dispatch_mode,
)


def python_function(op) -> object:
    """Return the Python function behind a torch.library.custom_op, to call it without the dispatcher (direct.py).

    The decorator replaces the function by the operator, which has no public attribute for the function. The public
    torch.library.get_kernel(op, "CPU").call_boxed skips the dispatcher too, but it is slower: an empty op takes 12 us
    through the dispatcher, 6 us with call_boxed and 2 us as a function (torch 2.13, on a CPU).
    """
    return op._init_fn


def is_observed() -> bool:
    """Return whether torch.compile, a dispatch mode such as FakeTensorMode, or a profiler must see operators.

    PyTorch has no public query for dispatch modes and profilers.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or profiler._is_profiler_enabled


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is equal for two storages if they are the same memory.

    It works for fake tensors too, while data_ptr() is 0 for every fake storage.
    """
    return storage._cdata


def shorten_operator_errors() -> None:
    """Stop Inductor from writing all arguments of a custom op into an error message, which it never shows.

    The message doubles in length with every layer before the op. With custom ops in 12 layers, the compilation did not
    finish (torch 2.11). torch 2.13 still writes the arguments.
    """
    from torch._inductor.exc import OperatorIssue

    OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"  target: {target}")


def allow_graphs(count: int) -> AbstractContextManager:
    """Within it, torch.compile may make `count` graphs of one function. By default it stops after 8.

    torch 2.13 has a public way, torch.compile(recompile_limit=...).
    """
    limits = {"recompile_limit": max(8, count), "accumulated_recompile_limit": max(256, 8 * count)}
    return torch._dynamo.config.patch(**limits)
