"""Find what a kernel changed in this process, functions and settings. A worker reports it, and the judge names it.

A kernel has no honest reason to replace a clock, a rule or a comparison. The judge does not rely on this report,
because a worker could forge it. Nothing that a worker replaces reaches the judge's own process.
"""

import sys
import time
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType

import torch

ROOMS = "common", "data", "kernels", "lab", "model", "runtime"
LIBRARIES = time, torch.nn.functional, torch.cuda, torch.Tensor, torch.cuda.Event, torch.cuda.Stream, torch.Generator
# The functions of the module torch that are compared. Dynamo replaces others when it is imported
FUNCTIONS = "empty", "empty_like", "zeros", "ones", "randn", "rand", "randint", "equal", "allclose", "isclose"
KINDS = FunctionType, BuiltinFunctionType, type


def find_functions() -> dict[str, object]:
    """Return {name: function} of all functions that a kernel must not replace, in the modules imported so far."""
    functions = {f"torch.{name}": getattr(torch, name) for name in FUNCTIONS}
    for owner in LIBRARIES:
        label = getattr(owner, "__module__", "")
        prefix = f"{label}.{owner.__name__}" if isinstance(owner, type) else owner.__name__
        functions |= {f"{prefix}.{name}": value for name, value in vars(owner).items() if callable(value)}
    for name, module in list(sys.modules.items()):
        if (name.partition(".")[0] in ROOMS or name == "__main__") and module is not None:
            functions |= dict(functions_of(name, vars(module)))
    return functions


def functions_of(prefix: str, members: dict) -> Iterator[tuple[str, object]]:
    """Yield (name, function) of a module's functions and of the methods of its classes."""
    for name, value in list(members.items()):
        if isinstance(value, type) and value.__module__ == prefix:
            yield from ((f"{prefix}.{name}.{method}", each) for method, each in vars(value).items() if callable(each))
        if isinstance(value, KINDS):
            yield f"{prefix}.{name}", value


def replaced_functions(before: dict[str, object]) -> list[str]:
    """Return the sorted names in `before`, a result of find_functions(), whose function is another object now."""
    now = find_functions()
    return sorted(name for name, function in before.items() if now.get(name) is not function)


def process_settings() -> dict[str, object]:
    """Return {name: value} of settings that a kernel must not change, and that no part of hotswap changes."""
    return {
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "denormals": (torch.tensor(1e-39) * 1).item(),
    }


def changed_settings(before: dict[str, object]) -> list[str]:
    """Return the names in `before`, a result of process_settings(), whose value is another one now."""
    now = process_settings()
    return [name for name, value in before.items() if now[name] != value]
