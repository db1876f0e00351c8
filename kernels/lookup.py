"""Find a backend by its name on the command line, and import it.

    mine                 kernels/OP/mine.py; or the entry point OP.mine of an installed package, in the group GROUP
    path/to/mine.py      a file anywhere; a relative path starts at the current folder
    some_package.module  a module that Python can import

If a file and an entry point have the same name, the file is taken.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from common.terminal import class_and_message

ROOT = Path(__file__).parent
GROUP = "hotswap.kernels"
_paths: dict[str, str] = {}  # module -> the path that it was loaded from, as the user wrote it


class KernelError(ValueError):
    """The command line, a kernel's file or a table of launch parameters is wrong. The message is one line."""


def files(op: str) -> list[str]:
    """Return the names of the op's files, which are the backends of this repo."""
    with os.scandir(ROOT / op) as entries:  # a glob asks the disk for each file, and a config needs this list 300 times
        names = [entry.name.removesuffix(".py") for entry in entries if entry.name.endswith(".py") and entry.is_file()]
    return sorted(name for name in names if name.isidentifier() and not name.startswith("_"))


@functools.cache
def installed(op: str) -> dict[str, EntryPoint]:
    """Return {name: entry point} of the backends in installed packages. `norm.fast` is the backend `fast` of norm."""
    points = {point.name: point for point in entry_points(group=GROUP) if point.name.startswith(f"{op}.")}
    return {name.removeprefix(f"{op}."): point for name, point in points.items() if name.count(".") == 1}


def impls(op: str) -> list[str]:
    """Return the names of the op's backends: the files in its folder, and the entry points of installed packages."""
    return sorted({*files(op), *installed(op)})


def is_path(impl: str) -> bool:
    return impl.endswith(".py") or "/" in impl


def _path(impl: str) -> Path:
    return Path(os.path.expanduser(impl))  # unlike Path.expanduser(), it raises no error for an unknown home folder


def short_name(impl: str) -> str:
    """Return the name of a backend as a part of a folder's name: a path without its folders."""
    return Path(impl).name if is_path(impl) else impl


def check_name(op: str, impl: str, key: str) -> None:
    """Raise KernelError if there is no backend `impl` of the op. The message names the config key `key`.

    The packages around a module with a dotted name are imported.
    """
    if is_path(impl):
        if not (impl.endswith(".py") and _path(impl).is_file()):
            raise KernelError(f"{key}={impl}: no file {impl} in {Path.cwd()}; the path of a backend ends in .py")
    elif "." in impl:
        try:
            spec = importlib.util.find_spec(impl)
            reason = None if spec else f"no module {impl}"
        except Exception as error:  # the user's package may raise any error
            spec, reason = None, class_and_message(error)
        if spec and not spec.has_location:  # a namespace package has no file
            raise KernelError(
                f"{key}={impl}: this is a folder without __init__.py; name a module in it, as {key}={impl}.NAME"
            )
        if reason:
            raise KernelError(f"{key}={impl}: {reason}; install its package, or add its folder to PYTHONPATH")
    elif impl not in impls(op):
        raise KernelError(f"{key}={impl}: no file kernels/{op}/{impl}.py; there are {', '.join(impls(op))}")


def module_name(op: str, impl: str) -> str:
    """Return the name of the backend's module. A file outside this repo gets a unique name.

    __package__ is "kernels", or "hotswap.kernels" in the package that pip installs.
    """
    if is_path(impl):
        path = _path(impl).resolve()
        if path.parent == ROOT / op and path.stem in files(op):
            return f"{__package__}.{op}.{path.stem}"
        digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
        return re.sub(r"\W", "_", f"backend_{path.stem}_{digest}")
    if "." in impl:
        return impl
    return f"{__package__}.{op}.{impl}" if impl in files(op) else installed(op)[impl].module


def import_module(op: str, impl: str) -> ModuleType:
    """Import the backend once, and return its module. Raises what its code raises."""
    name = module_name(op, impl)
    if not is_path(impl) or name.startswith(f"{__package__}."):
        return importlib.import_module(name)
    _paths[name] = impl
    return import_file(source_file(op, impl), name)


def import_file(path: Path, name: str) -> ModuleType:
    """Import a file once, as the module `name`. Raises what its code raises."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def source(op: str, impl: str) -> str:
    """Return where the backend is, as the user writes it: kernels/norm/mine.py, path/to/mine.py or package.module."""
    name = module_name(op, impl)
    if is_path(impl):
        return impl
    return f"kernels/{op}/{impl}.py" if name == f"{__package__}.{op}.{impl}" else name


def source_of(function: Callable) -> str:
    """Return the name of the function's module, or, if the user gave a path, this path."""
    return _paths.get(function.__module__, function.__module__)


def source_file(op: str, impl: str) -> Path:
    """Return the path of the backend's file, without importing it."""
    if is_path(impl):
        return _path(impl).resolve()
    return Path(importlib.util.find_spec(module_name(op, impl)).origin)


def shared_files() -> list[Path]:
    """Return the files of Python that several ops use: kernels/*.py and kernels/hopper/*.py."""
    return [*ROOT.glob("*.py"), *(ROOT / "hopper").glob("*.py")]


def backend(op: str, impl: str) -> ModuleType:
    """Return the backend's module. It can be imported on every device, also where the backend cannot run.

    Raises KernelError if there is no such backend, if it cannot be imported, or if it lacks the op's function.
    """
    check_name(op, impl, key=op)
    try:
        module = import_module(op, impl)
    except Exception as error:  # the file may be a user's, so any error is possible
        name = module_name(op, impl)
        code = f"import {name}"
        if is_path(impl):
            code = f'import runpy; runpy.run_path("{impl}")'
        raise KernelError(
            f"{source(op, impl)} cannot be imported ({class_and_message(error)}): python -c '{code}' shows where"
        ) from error
    if not callable(getattr(module, op, None)):
        raise KernelError(f"{source(op, impl)} defines no function {op}(...); kernels/{op}/__init__.py shows it")
    return module


def importable_backends(op: str) -> dict[str, ModuleType]:
    """Return {name: module} of the op's backends. It leaves out a backend for which backend() raises KernelError."""
    modules = {}
    for impl in impls(op):
        with contextlib.suppress(KernelError):
            modules[impl] = backend(op, impl)
    return modules
