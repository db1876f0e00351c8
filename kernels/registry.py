"""Which backends exist, and who computes each op.

A folder is an op, a file in it is a backend, and the file's name is the value on the command line:
`kernels/norm/mine.py` is `kernels.norm=mine`. The folder's `__init__.py` is the op's contract:

    reference(...)      plain PyTorch, any dtype; in float64 it is the truth
    inputs(...)         random arguments of the op, as a dict, for a dtype and a device
    cost(...)           {"forward": (FLOPs, bytes), "backward": (FLOPs, bytes)}, every tensor moved once
    SHAPES, CASES       keyword arguments of inputs(): the shapes to measure, and those that bite

and a backend is a file with the op's function, and where it has something to say

    unavailable(device)    None, or one sentence: why it cannot run on this torch.device and what would change that
    detail(**inputs)       what it will really run for these (fake) arguments, and its version: "cudnn, torch 2.11.0"
    RUNS                   patterns that a profile of a training step must have, of the names of kernels (on a CPU of
                           operators); or a dict, from a word of detail() to them: the first that it contains
    KEEPS                  of an attention, names of its operators whose outputs are all that its backward needs besides
                           q, k and v: model.keep_attention=true keeps them in a checkpoint
    deterministic = False  two calls on a GPU may differ in their last bits: sums by atomics
    candidates(kernel, default)    launch parameters to try, each a dict of what it changes: see tuned.py
    VERSIONS               names of implementations that it can choose among; its function, unavailable() and detail()
                           then take version=NAME, by which the command line pins one (attn.version)
"""

import functools
import importlib
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = ("norm", "attention", "mlp", "loss")
ROOT = Path(__file__).parent


class KernelError(ValueError):
    """A choice of kernel that does not exist or is not what its op asks for; the message is one line."""


class Unavailable(KernelError):
    """The backend exists and cannot run here; the message says why and what would make it run."""

    status = "unavailable"  # the word in a result row


class Ops(NamedTuple):
    """The function that computes each op: what `model/` is built from."""

    norm: Callable
    attention: Callable
    mlp: Callable
    loss: Callable


@dataclass
class KernelsConfig:
    norm: str
    mlp: str
    loss: str
    compile: bool  # torch.compile around the whole model; it crosses with every backend

    def __post_init__(self):
        for op in ("norm", "mlp", "loss"):
            check_name(op, getattr(self, op), key=f"kernels.{op}")


@dataclass
class AttnConfig:
    impl: str
    version: str | None = None  # of an implementation that has several

    def __post_init__(self):
        check_name("attention", self.impl, key="attn.impl")
        versions = getattr(backend("attention", self.impl), "VERSIONS", ()) if self.version else ()
        if self.version and self.version not in versions:
            known = f"choose {', '.join(versions)}, or null" if versions else f"attn={self.impl} has no versions"
            raise KernelError(f"attn.version={self.version}: {known}")


def impls(op: str) -> list[str]:
    """The names of `op`'s backends: the files in its folder."""
    paths = (ROOT / op).glob("[!_]*.py")
    return sorted(path.stem for path in paths if path.is_file() and path.stem.isidentifier())


def choices() -> dict[str, dict]:
    """For the command line: attn=NAME for every attention, whether it has a YAML file or not."""
    return {"attn": {name: {"impl": name} for name in impls("attention")}}


def contract(op: str) -> ModuleType:
    """The op's own module, with reference(), inputs(), cost(), SHAPES and CASES."""
    return importlib.import_module(f"kernels.{op}")


def backend(op: str, impl: str) -> ModuleType:
    """The backend's module, wherever it may run. KernelError: there is none, or it lacks the op's function."""
    check_name(op, impl, key=op)
    module = importlib.import_module(f"kernels.{op}.{impl}")
    if not callable(getattr(module, op, None)):
        raise KernelError(f"kernels/{op}/{impl}.py defines no function {op}(...); kernels/{op}/__init__.py shows it")
    return module


def pinned(version: str | None) -> dict[str, str]:
    return {} if version is None else {"version": version}


def unavailable(op: str, impl: str, device: torch.device, version: str | None = None) -> str | None:
    """Why this backend, or this version of it, cannot run on `device`, in one sentence, or None."""
    probe = getattr(backend(op, impl), "unavailable", None)
    return probe(device, **pinned(version)) if probe else None


def load(op: str, impl: str, device: torch.device, needs: Sequence[str] = (), version: str | None = None) -> Callable:
    """The function that computes `op`; `needs` are arguments that a backend may leave out, and this one must not.

    Unavailable: it cannot run on `device`, or has left one out.
    """
    if why := unavailable(op, impl, device, version):
        raise Unavailable(f"{op}={impl} cannot run here: {why}")
    function = getattr(backend(op, impl), op)
    if version:
        function = functools.update_wrapper(functools.partial(function, version=version), function)
    for why in filter(None, (refusal(function, argument) for argument in needs)):
        raise Unavailable(f"{op}={impl} cannot run this: {why}")
    return function


def chosen(kernels: KernelsConfig, attn: AttnConfig) -> dict[str, str]:
    """Op -> name of the backend that the config asks for."""
    return {"norm": kernels.norm, "attention": attn.impl, "mlp": kernels.mlp, "loss": kernels.loss}


def refusal(attention: Callable, argument: str) -> str | None:
    """Why a model cannot have this argument, `lengths`, `window` or `starts`: the backend leaves it out. Or None."""
    if argument in inspect.signature(attention).parameters:
        return None
    functions = {impl: backend("attention", impl).attention for impl in impls("attention")}
    able = [impl for impl, function in functions.items() if argument in inspect.signature(function).parameters]
    return f"{attention.__module__} takes no {argument} (kernels/attention/__init__.py): choose attn={', '.join(able)}"


def keeps(attention: Callable) -> Sequence[str]:
    """The names of its operators whose outputs a checkpoint may keep. Unavailable: it names none."""
    if names := getattr(sys.modules[attention.__module__], "KEEPS", ()):
        return names
    able = [impl for impl in impls("attention") if hasattr(backend("attention", impl), "KEEPS")]
    raise Unavailable(
        f"model.keep_attention=true: {attention.__module__} names no operator whose outputs could be kept (KEEPS, "
        f"kernels/registry.py): choose attn={', '.join(able)}"
    )


def resolve(kernels: KernelsConfig, attn: AttnConfig, device: torch.device, needs: Sequence[str] = ()) -> Ops:
    """The functions that the config asks for; `needs` are arguments that attention may leave out and must not.

    Unavailable: one of them, or torch.compile, cannot run on `device`, or attention lacks what it needs.
    """
    if kernels.compile and not compiler():
        raise Unavailable("kernels.compile=true cannot run here: it needs g++ or clang++; install one")
    brief_log()
    asked = {"attention": (needs, attn.version)}
    return Ops(**{op: load(op, impl, device, *asked.get(op, ())) for op, impl in chosen(kernels, attn).items()})


def brief_log() -> None:
    """Keep PyTorch 2.11 from writing all that leads to a custom op into a line of its log, whether or not it is shown.

    That text doubles with every layer: with custom ops in 12 of them, compilation never came to the loss.
    """
    from torch._inductor.exc import OperatorIssue

    OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"  target: {target}")


def compiler() -> str | None:
    """The C++ compiler that torch.compile would find, or None."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def describe(op: str, impl: str, version: str | None = None, **shape) -> str:
    """Who computes `op` for arguments like inputs(**shape): "sdpa (cudnn, torch 2.11.0)". Takes no memory."""
    detail = getattr(backend(op, impl), "detail", None)
    if detail is None:
        return f"{impl} (torch {torch.__version__})"
    with FakeTensorMode():
        return f"{impl} ({detail(**contract(op).inputs(**shape), **pinned(version))})"


def runs(op: str, impl: str, told: str) -> tuple[str, ...]:
    """The patterns of names that a profile must have where this backend ran as it `told`; none: it does not say."""
    found = getattr(backend(op, impl), "RUNS", ())
    if isinstance(found, dict):
        return next((patterns for word, patterns in found.items() if word in told), ())
    return found


def label(kernels: KernelsConfig, attn: AttnConfig) -> str:
    """The choice in a few letters: `eager-sdpa`, `compile-flash.fa4`, `norm.triton+mlp.eager+loss.eager-sdpa`."""
    ops = {"norm": kernels.norm, "mlp": kernels.mlp, "loss": kernels.loss}
    names = set(ops.values())
    name = names.pop() if len(names) == 1 else "+".join(f"{op}.{impl}" for op, impl in ops.items())
    if kernels.compile:
        name = "compile" if name == "eager" else f"{name}+compile"
    return f"{name}-{attn.impl}" + (f".{attn.version}" if attn.version else "")


def check_name(op: str, impl: str, key: str) -> None:
    if impl not in impls(op):
        raise KernelError(f"{key}={impl}: no file kernels/{op}/{impl}.py; there are {', '.join(impls(op))}")
