"""The private parts of PyTorch and Triton that this room uses, and why.

tests/lab/test_compat.py fails if one of these parts stops working or is no longer needed. pyproject.toml lists the
tested versions.
"""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_leaves  # noqa: F401  torch.utils has no public name for it

from kernels.compat import FakeTensorMode

INDUCTOR_CONFIG = "torch._inductor.config"  # by name, because its import takes 1 to 2 s, and train.py does not need it


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Within this context every new tensor is fake, parameters included, and Triton launches nothing."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(warnings.catch_warnings())
        # Triton's TMA descriptors read addresses, and a fake tensor's address is 0
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # Module.to() calls swap_tensors(), which refuses a tensor with weak references. FakeTensorMode holds weak
        # references to the tensors of each operator that is not in its cache yet
        stack.enter_context(patch("torch.utils.swap_tensors", lambda a, b: setattr(a, "data", b)))
        if find_spec("triton"):
            from triton.runtime.jit import KernelInterface

            launch_nothing = patch.object(KernelInterface, "__getitem__", lambda kernel, grid: lambda *_, **__: None)
            stack.enter_context(launch_nothing)
        yield


def compile_without_workers() -> None:
    """Let torch.compile compile in this process, without its pool of worker processes.

    The pool takes seconds to start, and may outlive this process. torch.compiler.config has no such option. Many
    processes never compile, so Inductor is not imported here: it reads the environment variable at its import.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if INDUCTOR_CONFIG in sys.modules:
        sys.modules[INDUCTOR_CONFIG].compile_threads = 1


def custom_op_function(name: str) -> Callable | None:
    """Return the Python function behind a torch.library.custom_op, by the operator's name ("hotswap::norm_fwd").

    None for any other operator. PyTorch has no public lookup.
    """
    definition = OPDEFS.get(name)
    return definition._init_fn if definition else None


def custom_op_fake(name: str) -> Callable | None:
    """Return the function given to register_fake() of a torch.library.custom_op. None for any other operator."""
    definition = OPDEFS.get(name)
    return definition._abstract_fn if definition else None


def uses_triton(function: Callable) -> bool:
    """Return whether the function's module has Triton kernels, or imports a function from a kernels/*.py that has them.

    Such a function calls only these kernels and PyTorch.
    """
    from triton.runtime.jit import KernelInterface

    imported = function.__globals__.values()
    helpers = [value for value in imported if re.fullmatch(r"kernels\.\w+", getattr(value, "__module__", None) or "")]
    modules = [function.__globals__, *(getattr(helper, "__globals__", {}) for helper in helpers)]
    return any(isinstance(value, KernelInterface) for module in modules for value in module.values())


@contextmanager
def record_memory(path: Path | None) -> Iterator[None]:
    """Write a snapshot of the CUDA allocator to `path`: what it holds, and each allocation within this context.

    Each allocation has its Python stack. PyTorch documents both functions, but they have no public names.
    """
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        yield
        if path:
            torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def compile_with(backend: str | Callable) -> Iterator[None]:
    """Within this context torch.compile uses `backend`, and a function compiles again for each new shape.

    By default Dynamo makes at most 8 graphs of a function, and the second has symbols in place of sizes. There is no
    public way to change that for code that calls torch.compile itself.
    """
    from torch._dynamo import config

    limits = {"recompile_limit": 512, "accumulated_recompile_limit": 4096, "automatic_dynamic_shapes": False}
    with config.patch(limits), torch.compiler.set_stance("default", force_backend=backend):
        yield
