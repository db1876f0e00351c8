"""The ops and their backends: which of them the config chooses, and which function computes each op.

A folder is an op, a file in it is a backend, and the file's name is the value on the command line:
`kernels/norm/mine.py` is `kernels.norm=mine`. A backend may also be a file or a module elsewhere (lookup.py). Nothing
else lists ops or backends: the config, the tests, the benchmark, the doctor and the report read them from names.py and
here (tests/kernels/test_new_op.py).

The folder's `__init__.py` is the op's contract. It must define

    reference(...)      plain PyTorch in any dtype; its float64 result counts as exact
    inputs(...)         random arguments of the op, as a dict, for a shape, a dtype and a device
    cost(...)           {"forward": (FLOPs, bytes), "backward": (FLOPs, bytes)}, every tensor moved once
    SHAPES, CASES       keyword arguments of inputs(), by name: the shapes to measure, and the shapes that break kernels
    SIZES, FEATURES     what the doctor's matrix tests: keyword arguments of inputs(), in every dtype; and names in
                        CASES, in bf16 (on a CPU: fp32)
    BOUND               "bytes" or "flops": what limits the op's speed on a GPU, so its unit is TB/s or TFLOP/s

and it may define

    TENSORS, ANY_STRIDES    {argument: the names of its dimensions}, and the tensors that need not be contiguous: load()
                        then checks each call (arguments.py)
    OPTIONAL            the arguments that the function of a backend may lack. load() raises Unavailable if it lacks one
                        of the arguments that a model needs
    conflict(...)       None, or in one line, why sizes that TENSORS allows do not fit together
    in_model(...)       keyword arguments of inputs() for the call that a model of these sizes makes; None if it does
                        not call the op. Without in_model(), no model calls it
    MODEL               fields of GPTConfig with which a model calls the op, if GPT-2 does not: {"norm": "rmsnorm"}
    products(...)       (rows, inner, columns) of the matmuls that no backend can avoid: the floor of the op's time.
                        Without products(), the floor is a copy of cost()'s bytes if BOUND is "bytes", otherwise none
    ALONG               {output: argument}: check.py also compares the output's part along this argument
    FAMILY              a pattern for the names of the op's kernels in a profile, when PyTorch computes it
    LENGTHS             more sizes of the doctor's matrix, in one dtype
    GRADIENTS_IN_FORWARD = True    some backends compute the gradients in the forward, so the report gives only the
                        rate of forward and backward together
    TRAINS = False      the training step does not call the op, and the op has no gradients (decode)
    OPTIMIZER = True    the optimizer calls the op, and not the model. The op has no gradients
    results(function, **arguments)    for an op that changes its arguments (adamw): returns what it changes, from copies
    DEFAULT             the backend that runs if the config names none; without DEFAULT it is eager (names.py reads
                        these three, which are literals, without importing the file)

A backend is a file with the op's function. It may also define

    unavailable(device)    None, or one sentence: why it cannot run on this torch.device and what would make it run
    detail(**inputs)       what it runs for these (fake) arguments, and its version: "cudnn, torch 2.11.0"
    RUNS                   patterns; each must match the name of a kernel (on a CPU: of an operator) in the profile of
                           a training step. Or {word: patterns}; the first word that detail() contains counts
    FAMILY                 a pattern for the names of its own kernels, for the share of the step that the op takes
    KEEPS                  attention only: names of operators. With their outputs and q, k and v its backward can run,
                           so model.keep_attention=true keeps these outputs in an activation checkpoint
    FP8_KEYS = True        attention only: k and v may be float8_e4m3fn, the dtype of a cache with generate.kv=fp8
    norm_in_fp8            norm and rms_norm only: like the op's function, with y as InFp8 of kernels/fp8.py
    INPUT_IN_FP8 = True    linear and mlp only: with fp8=True, x may be InFp8
    refusal(*tensors, ...)    takes the arguments of the op's function. It returns None, or in a few words what the
                           backend takes instead: the function then raises Unavailable, and auto takes another backend
    OWN_SCALES = True      in fp8 its scales differ from those in kernels/fp8.py: see check.py
    deterministic = False  two calls on a GPU may differ in their last bits, because of atomic sums
    candidates(kernel, default)    launch parameters to try, each a dict of changes to `default`: see tuned.py
    RUNTIME                the name of another library that compiles and launches its kernels, "XLA". torch.compile
                           cannot trace such a backend, and no CUDA graph can contain it
    VERSIONS               attention only: names of implementations that it can choose among; its function,
                           unavailable() and detail() then take version=NAME, which attn.version sets
"""

import functools
import importlib
import inspect
import os
import re
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from types import ModuleType
from typing import Any

import torch

from kernels import compat, fp8
from kernels.arguments import check_arguments
from kernels.lookup import backend, check_name, impls, importable_backends, short_name, source_of  # noqa: F401
from kernels.names import (
    ALL_OPS,
    OPS,
    OPTIMIZER_OPS,
    TRAINING_OPS,
    KernelError,
    config_key,
    default_impl,
    ops_with_a_choice,
    override_key,
    preset_name,
)

Ops = namedtuple("Ops", OPS)  # the function that computes each op: model/ is built from these


COMPILE_MODES = "default", "max-autotune-no-cudagraphs", compat.CUTLASS_MODE


class Unavailable(KernelError):
    """The backend exists and cannot run here. The message says why, and what would make it run."""

    status = "unavailable"  # the word in a result row


def contract(op: str) -> ModuleType:
    """Return the op's module, which has reference(), inputs(), cost(), SHAPES, CASES and the rest."""
    return importlib.import_module(f"{__package__}.{op}")


@dataclass
class KernelsConfig(make_dataclass("Backends", [(op, str, default_impl(op)) for op in ALL_OPS if op != "attention"])):
    """The backend of each op but attention, which has a config group of its own: `kernels.norm`, `kernels.mlp`, ..."""

    compile: bool = False  # torch.compile around the whole model; works with every backend
    compile_mode: str = "default"  # of torch.compile: one of COMPILE_MODES
    check: bool = True  # before training, check backends that are not of this repo (lab/bench/new_backends.py)
    fp8: Any = None  # with precision=fp8, a list of the ops whose products are in fp8; None: every op that can

    def __post_init__(self) -> None:
        for op in ALL_OPS:
            if op != "attention":
                check_name(op, getattr(self, op), config_key(op))
        if self.compile_mode not in COMPILE_MODES:
            reason = f"choose {', '.join(COMPILE_MODES)}"
            if self.compile_mode in ("max-autotune", "reduce-overhead"):
                reason = "it captures CUDA graphs of its own, and train.cuda_graph captures the whole step: " + reason
            raise KernelError(f"kernels.compile_mode={self.compile_mode}: {reason}")
        if self.compile_mode != "default" and not self.compile:
            raise KernelError(f"kernels.compile_mode={self.compile_mode} has no effect: add kernels.compile=true")
        if self.fp8 is None:
            return
        chosen, possible = [self.fp8] if isinstance(self.fp8, str) else self.fp8, [op for op in OPS if takes_fp8(op)]
        if not isinstance(chosen, list) or any(op not in possible for op in chosen):
            names = ", ".join(possible)
            raise KernelError(f"kernels.fp8={self.fp8}: it must be a list of ops that can run in fp8: {names}")
        # equal choices are equal
        self.fp8 = None if set(chosen) == set(possible) else [op for op in possible if op in chosen]

    @property
    def decoder_options(self) -> dict[str, Any]:
        """The arguments of Decoder (model/decoder.py) that the config chooses."""
        return {"decode": self.decode, "compiled": self.compile, "compile_mode": self.compile_mode}


@dataclass
class AttnConfig:
    impl: str
    version: str | None = None  # an implementation in the backend's VERSIONS; None: the backend chooses

    def __post_init__(self) -> None:
        check_name("attention", self.impl, config_key("attention"))
        if self.version is None:
            return
        versions = getattr(backend("attention", self.impl), "VERSIONS", ())
        if self.version not in versions:
            remedy = f"choose {', '.join(versions)}, or null" if versions else f"attn={self.impl} has no versions"
            raise KernelError(f"attn.version={self.version}: {remedy}")


def unavailable(op: str, impl: str, device: torch.device, version: str | None = None) -> str | None:
    """Return, in one sentence, why this backend or this version of it cannot run on `device`, or None if it can.

    A backend that imports triton and has no unavailable() needs what Triton needs. Raises KernelError as backend().
    """
    module = backend(op, impl)
    if is_silent_triton(module):
        return importlib.import_module(f"{__package__}.gpu").triton_unavailable(device)
    probe = getattr(module, "unavailable", None)
    return probe(device, **version_argument(version)) if probe else None


def is_silent_triton(module: ModuleType) -> bool:
    """Return whether a backend imports triton and says nothing about where it runs, as a user's first file does."""
    return "triton" in vars(module) and not hasattr(module, "unavailable")


def refuse_interpreted_bf16(op: str, impl: str, function: Callable) -> Callable:
    """Return a function that raises Unavailable for bf16, in which Triton's interpreter gives wrong results."""

    @functools.wraps(function, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        for value in (*arguments, *named.values()):
            if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                importlib.import_module(f"{__package__}.gpu").check_dtypes(op, value, impl=impl)
        return function(*arguments, **named)

    return call


def version_argument(version: str | None) -> dict[str, str]:
    return {} if version is None else {"version": version}


def load(op: str, impl: str, device: torch.device, needs: Sequence[str] = (), version: str | None = None) -> Callable:
    """Return the function that computes the op. A call with wrong shapes raises KernelError (arguments.py).

    `needs` are optional arguments that this function must take. Raises Unavailable if the backend cannot run on
    `device` or lacks one of them.
    """
    if reason := unavailable(op, impl, device, version):
        raise Unavailable(f"{op}={impl} cannot run here: {reason}")
    if "fp8" in needs and (reason := fp8.unavailable(device)):
        raise Unavailable(f"precision=fp8 cannot run here: {reason}")
    function = getattr(backend(op, impl), op)
    if os.environ.get("TRITON_INTERPRET") == "1" and is_silent_triton(backend(op, impl)):
        function = refuse_interpreted_bf16(op, impl, function)
    if version:
        function = functools.update_wrapper(functools.partial(function, version=version), function, updated=())
    for argument in needs:
        if reason := missing_argument(function, argument, op):
            raise Unavailable(f"{op}={impl} cannot run this: {reason}")
    return check_arguments(op, contract(op), function)


def impl_by_op(kernels: KernelsConfig, attn: AttnConfig, ops: Sequence[str] = OPS) -> dict[str, str]:
    """Return {op: the name of the backend that the config chooses}. By default the ops are those that a model calls."""
    return {op: attn.impl if op == "attention" else getattr(kernels, op) for op in ops}


def missing_argument(function: Callable, argument: str, op: str = "attention") -> str | None:
    """Return why the op's function cannot take an optional argument (`window`, `softcap`, `fp8`), or None if it can."""
    if argument in inspect.signature(function).parameters:
        return None
    functions = {impl: getattr(module, op) for impl, module in importable_backends(op).items()}
    others = ", ".join(impl for impl, other in functions.items() if argument in inspect.signature(other).parameters)
    return f"{source_of(function)} takes no {argument} (kernels/{op}/__init__.py): choose {override_key(op)}={others}"


def reads_fp8(attention: Callable) -> bool:
    """Return whether this attention takes keys and values in fp8."""
    return getattr(module_of(attention), "FP8_KEYS", False)


def checkpointed_operators(attention: Callable) -> Sequence[str]:
    """Return the names of this attention's operators whose outputs an activation checkpoint may keep.

    Raises Unavailable if the backend names none (KEEPS).
    """
    if names := getattr(module_of(attention), "KEEPS", ()):
        return names
    others = [impl for impl, module in importable_backends("attention").items() if hasattr(module, "KEEPS")]
    raise Unavailable(
        f"model.keep_attention=true: {source_of(attention)} names no operator whose outputs could be kept (KEEPS, "
        f"kernels/registry.py): choose attn={', '.join(others)}"
    )


def takes_fp8(op: str) -> bool:
    """Return whether the op is one of a training step, and can compute its products in fp8."""
    return op in OPS and "fp8" in inspect.signature(contract(op).reference).parameters


def runs_in_fp8(op: str, kernels: KernelsConfig) -> bool:
    """Return whether the op computes its products in fp8 with precision=fp8 and these kernels."""
    return takes_fp8(op) if kernels.fp8 is None else op in kernels.fp8


def rounds_in_inductor(kernels: KernelsConfig, attn: AttnConfig, called: Sequence[str]) -> bool:
    """Return whether torch.compile writes kernels that round to fp8, because a backend has none of its own (RUNS)."""
    in_fp8 = {op: impl for op, impl in impl_by_op(kernels, attn, called).items() if runs_in_fp8(op, kernels)}
    return any(not getattr(backend(op, impl), "RUNS", ()) for op, impl in in_fp8.items())


def other_runtimes(functions: Mapping[str, Callable]) -> dict[str, str]:
    """Return {op: "kernels.norm.xla runs in XLA"} for those of {op: its function} whose backend has a RUNTIME."""
    found = {}
    for op, function in functions.items():
        function = getattr(function, "func", function)  # with fp8=True it is a functools.partial
        if runtime := getattr(module_of(function), "RUNTIME", None):
            found[op] = f"{source_of(function)} runs in {runtime}"
    return found


def check_available(kernels: KernelsConfig, attn: AttnConfig, device: torch.device) -> None:
    """Raise Unavailable if backends of the model cannot run on `device`. The message names all of them."""
    backends: dict[str, list[str]] = {}  # the reason why they cannot run here -> their names
    for op, impl in impl_by_op(kernels, attn).items():
        if reason := unavailable(op, impl, device, attn.version if op == "attention" else None):
            backends.setdefault(reason, []).append(f"{op}={impl}")
    if backends:
        raise Unavailable("; ".join(f"{', '.join(names)} cannot run here: {why}" for why, names in backends.items()))


def resolve(
    kernels: KernelsConfig,
    attn: AttnConfig,
    device: torch.device,
    needs: Mapping[str, Sequence[str]] | None = None,
    in_fp8: bool = False,
    called: Sequence[str] = OPS,
) -> Ops:
    """Return the functions that the config chooses. `needs` is {op: optional arguments that its function must take}.

    `called` are the ops that the model calls. With `in_fp8`, the ops of runs_in_fp8() compute their products in it.
    Raises Unavailable if backends, torch.compile or fp8 cannot run on `device`, or if a backend lacks an argument. The
    message names all backends that cannot run.
    """
    if kernels.fp8 is not None and not in_fp8:
        raise KernelError("kernels.fp8 needs precision=fp8: add precision=fp8, or remove kernels.fp8")
    if kernels.compile and not cpp_compiler():
        raise Unavailable("kernels.compile=true cannot run here: it needs g++ or clang++; install one")
    if (
        kernels.compile
        and in_fp8
        and rounds_in_inductor(kernels, attn, called)
        and (reason := fp8.choose_ptxas(device))
    ):
        raise Unavailable(f"kernels.compile=true with precision=fp8 cannot run here: {reason}")
    if kernels.compile:
        compat.shorten_operator_errors()  # imports Inductor, which takes 2 s
    check_available(kernels, attn, device)
    functions = {}
    for op, impl in impl_by_op(kernels, attn).items():
        needed, version = list((needs or {}).get(op, ())), attn.version if op == "attention" else None
        if in_fp8 and runs_in_fp8(op, kernels):
            function = load(op, impl, device, ["fp8", *needed], version)
            functions[op] = functools.partial(function, fp8=True)
        else:
            functions[op] = load(op, impl, device, needed, version)
    if kernels.compile and (others := other_runtimes(functions)):
        reason = f"torch.compile cannot trace other runtimes, and {', '.join(others.values())}"
        raise Unavailable(f"kernels.compile=true cannot run here: {reason}: choose kernels.compile=false")
    return Ops(**functions)


def norm_before(op: str | None, ops: Ops, norm: Callable) -> Callable:
    """Return `norm`, or its norm_in_fp8 if its backend can write fp8 and that of `op` can read it."""
    next_op = getattr(ops, op) if op else None
    if "fp8" in getattr(next_op, "keywords", {}) and getattr(module_of(next_op.func), "INPUT_IN_FP8", False):
        return getattr(module_of(norm), "norm_in_fp8", norm)
    return norm


def module_of(function: Callable) -> ModuleType:
    return sys.modules[function.__module__]


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile would use, or None."""
    paths = map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))
    return next(filter(None, paths), None)


def describe(op: str, impl: str, version: str | None = None, chosen: str | None = None, **shape: Any) -> str:
    """Return the backend and what it runs for inputs(**shape): "sdpa (cudnn, torch 2.11.0)". It allocates no memory.

    `chosen` is the backend that `auto` took when the model was built: "auto (triton: triton 3.6.0)".
    """
    detail = getattr(backend(op, impl), "detail", None)
    if chosen and chosen != impl:
        detail = functools.partial(describe_choice, op, chosen)
    if detail is None:
        return f"{impl} (torch {torch.__version__})"
    if not shape:
        return f"{impl} ({detail()})"
    with compat.FakeTensorMode():
        return f"{impl} ({detail(**contract(op).inputs(**shape), **version_argument(version))})"


def describe_choice(op: str, impl: str, **inputs: Any) -> str:
    """Return the backend's name and, if it has one, its own detail(): "triton: triton 3.6.0", "eager"."""
    detail = getattr(backend(op, impl), "detail", None)
    return f"{impl}: {detail(**inputs)}" if detail else impl


def expected_kernels(op: str, impl: str, description: str) -> tuple[str, ...]:
    """Return the patterns that the profile of a step must match (RUNS); () if the backend names none.

    `description` is what describe() returns for the backend.
    """
    runs = getattr(backend(op, impl), "RUNS", ())
    if not isinstance(runs, dict):
        return runs
    return next((patterns for word, patterns in runs.items() if word in description), ())


def called_backends(kernels: KernelsConfig, attn: AttnConfig, descriptions: dict[str, str]) -> dict[str, str]:
    """Return {op: the backend that ran}, for the ops with a description by describe().

    For `auto` the description names the backend: "auto (triton: triton 3.6.0)".
    """
    called = {op: impl for op, impl in impl_by_op(kernels, attn, TRAINING_OPS).items() if op in descriptions}
    return called | {op: called_backend(descriptions[op]) for op, impl in called.items() if impl == "auto"}


def called_backend(description: str) -> str:
    """Return the name of the backend that ran, from its description by describe()."""
    return re.match(r"(?:auto \()?(\w+)", description)[1]


def family_patterns(impls_by_op: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return {op: patterns of its kernels' names in a profile}: FAMILY of the contract and of the chosen backend.

    A kernel belongs to the first op with a matching pattern. The dict begins with the last op, because attention's
    pattern `softmax` would also match the loss's log_softmax.
    """
    patterns = {}
    for op, impl in reversed(impls_by_op.items()):
        names = [getattr(module, "FAMILY", "") for module in (contract(op), backend(op, impl))]
        patterns[op] = tuple(filter(None, names))
    return patterns


def label(kernels: KernelsConfig, attn: AttnConfig, called: Sequence[str]) -> str:
    """Return a short name of the choice: `eager-sdpa`, `compile-flash.fa4`, `norm.triton+mlp.eager+loss.eager-sdpa`.

    `called` are the ops that the model calls. `gluon` is kernels=gluon, which has Triton for the ops that Gluon lacks.
    `+adamw.eager` is a backend of the optimizer, unless it is the default.
    """
    named = [op for op in ops_with_a_choice() if op in called]
    backends = {op: short_name(impl) for op, impl in impl_by_op(kernels, attn, named).items()}
    name = preset_name(backends) or "+".join(f"{op}.{impl}" for op, impl in backends.items())
    if kernels.compile:
        name = "compile" if name == "eager" else f"{name}+compile"
        if kernels.compile_mode != "default":
            name += f".{kernels.compile_mode}"
    if kernels.fp8 is not None:
        name += "+fp8" + "".join(f".{op}" for op in kernels.fp8)
    for op in OPTIMIZER_OPS:
        if (impl := getattr(kernels, op)) != default_impl(op):
            name += f"+{op}.{short_name(impl)}"
    attention = short_name(attn.impl)
    return f"{name}-{attention}.{attn.version}" if attn.version else f"{name}-{attention}"
