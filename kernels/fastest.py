"""Choose the backend of an op that was measured to be the fastest on this GPU: kernels=auto attn=auto, decode=auto.

`python -m scripts.tune auto=true` stores the fastest backends in the user's table (tuned.py). The name of an entry has
the op and the dtypes: "mlp bfloat16 fp8". An entry has one backend for each measured width of the input, and for
attention for each T. The nearest width by ratio decides. The name of a decoder's entry has the width, and the entry has
a decoder for each number of sequences: "decode bfloat16 768".

A model's dtypes and widths are known before it is built, so it is built with the functions of the chosen backends
(name_backends() in model/executed.py). Each op's auto.py chooses at every call, for hotswap.op() and the benchmarks.
Only attention's does it in a model too, because the number of keys changes from call to call.

Every op is timed alone. So with precision=fp8 the choice ignores that a norm can write fp8 for the next op
(norm_before() in registry.py).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from common.terminal import warn
from kernels import registry
from kernels.registry import Unavailable, backend, contract, default_impl, describe_choice, impls
from kernels.tuned import merged_table, read_table, table_paths, tables_in_use, write_table

T = TypeVar("T")

FILL_COMMAND = "python -m scripts.tune auto=true"
NOT_MEASURED = "nothing was measured on this device yet"
# {(op, device type): {entry name: its size_ranges()}}. unavailable() fills it before any call of the op, because
# torch.compile cannot trace code that reads a file
_choices: dict[tuple[str, str], dict[str, list]] = {}
_eager: dict[str, ModuleType] = {}  # {op: the module of eager, which refuses nothing}
_arguments: dict[tuple[str, str], frozenset[str]] = {}  # {(op, backend): the names of its function's arguments}


def unavailable(op: str, device: torch.device) -> str | None:
    """Read the tables of `device` for later calls of the op. Return a reason if they have no entry, else None."""
    entries = measured_entries(op, device)
    for impl in dict.fromkeys(impl for by_size in entries.values() for impl in by_size.values()):
        if reason := registry.unavailable(op, impl, device):
            return f"{op}={impl} was the fastest, but cannot run now: {reason}; run {FILL_COMMAND} again"
        parameters = inspect.signature(getattr(backend(op, impl), op)).parameters
        _arguments[op, impl] = frozenset(parameters)
    _choices[op, device.type] = {name: size_ranges(op, by_size) for name, by_size in entries.items()}
    _eager[op] = backend(op, default_impl(op))
    return None if entries else f"{NOT_MEASURED}: run {FILL_COMMAND}"


def unavailable_decoders(device: torch.device) -> str | None:
    """Return a reason if the tables of `device` have no decoder. first_accepted() passes over one that cannot run."""
    return None if measured_entries("decode", device) else f"{NOT_MEASURED}: run {FILL_COMMAND} op=decode"


def measured_entries(op: str, device: torch.device) -> dict[str, dict[str, str]]:
    """Return {name of an entry: {size: the fastest backend}} of the op, without backends that no longer exist."""
    entries = {name: by_size for name, by_size in merged_table(device).items() if name.split()[0] == op}
    here = {name: {n: impl for n, impl in by_size.items() if impl in impls(op)} for name, by_size in entries.items()}
    return {name: by_size for name, by_size in here.items() if by_size}


def size_ranges(op: str, backend_by_size: dict[str, str]) -> list[tuple[float, str, ModuleType]]:
    """Return (upper bound of the size, backend's name, its module) for each measured size, smallest size first.

    The bound between two sizes is their geometric mean, because below it the smaller size is nearer by ratio.
    """
    sizes = sorted(map(int, backend_by_size))
    bounds = [math.sqrt(a * b) for a, b in pairwise(sizes)] + [math.inf]
    names = [backend_by_size[str(size)] for size in sizes]
    return [(bound, name, backend(op, name)) for bound, name in zip(bounds, names, strict=True)]


def find_backend(op: str, entry: str, size: int, device: torch.device) -> tuple[str, ModuleType] | None:
    """Return the name and the module of the backend for this size, or None if the tables have no such entry."""
    for bound, impl, module in _choices[op, device.type].get(entry, ()):
        if size <= bound:
            return impl, module
    return None


def entry_name(op: str, inputs: Iterable, fp8: bool = False) -> str:
    """Return the name of the entry for a call with these inputs: "norm bfloat16 float32", "mlp bfloat16 fp8"."""
    floats = [value for value in inputs if isinstance(value, Tensor) and value.is_floating_point()]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in floats})
    return " ".join([op, *dtypes, *(["fp8"] if fp8 else [])])


def choose(op: str, *tensors: Tensor | None, fp8: bool = False, needs: Iterable[str] = ()) -> tuple[str, ModuleType]:
    """Return the name and the module of the backend for these arguments of an op other than attention.

    It is eager if the fastest backend refuses these widths, because an entry has only the width of x, or if it lacks an
    optional argument in `needs`. Raises Unavailable if the tables have no entry for these dtypes.
    """
    x = tensors[0]
    entry = entry_name(op, tensors, fp8)
    if chosen := find_backend(op, entry, x.shape[-1], x.device):
        impl, module = chosen
        lacks = any(name not in _arguments[op, impl] for name in needs)
        return ("eager", _eager[op]) if lacks or refuses(module, *tensors, fp8=fp8) else chosen
    dtype = entry.split()[1]  # bfloat16 comes before float32, the dtype of a wider residual stream
    raise Unavailable(f"{op}=auto: nothing was measured for `{entry}` on this device: run {FILL_COMMAND} dtype={dtype}")


def choose_for(op: str, inputs: Mapping[str, Any], fp8: bool = False) -> tuple[str, ModuleType]:
    """Return what choose() returns for these arguments by name. Those with a default in the contract are optional."""
    parameters = inspect.signature(contract(op).reference).parameters
    options = [name for name in inputs if parameters[name].default is not inspect.Parameter.empty]
    return choose(op, *(inputs[name] for name in inputs if name not in options), fp8=fp8, needs=options)


def refuses(module: ModuleType, *arguments: Any, **options: Any) -> bool:
    """Return whether this backend refuses these arguments of its function (`refusal` in registry.py)."""
    return hasattr(module, "refusal") and module.refusal(*arguments, **options) is not None


def call_fastest(op: str, *tensors: Tensor | None, fp8: bool = False, **options: Any) -> Any:
    """Call the backend that choose() returns. It may lack the argument fp8, so it gets only fp8=True."""
    function = getattr(choose(op, *tensors, fp8=fp8, needs=options)[1], op)
    return function(*tensors, **options, **({"fp8": True} if fp8 else {}))


def detail(op: str, fp8: bool = False, **inputs: Any) -> str:
    """Return what `auto` runs for these inputs of an op other than attention: "triton: triton 3.6.0"."""
    impl, _ = choose_for(op, inputs, fp8)
    return describe_choice(op, impl, **inputs, **({"fp8": True} if fp8 else {}))


def rank_decoders(dtype: torch.dtype, width: int, batch: int, device: torch.device) -> list[str]:
    """Return the measured decoders for `batch` sequences of a model of this compute dtype and width, fastest first.

    The measurement is the one of the nearest width by ratio, and then of the nearest number of sequences. The last
    decoder is blocks if it was not measured. Raises Unavailable if the tables have no entry for this dtype.
    """
    if reason := unavailable_decoders(device):
        raise Unavailable(f"decode=auto cannot run here: {reason}")
    prefix = f"decode {str(dtype).removeprefix('torch.')} "
    names = [name for name in measured_entries("decode", device) if name.startswith(prefix)]
    widths = {name.removeprefix(prefix): name for name in names}
    if not widths:
        command = f"{FILL_COMMAND} op=decode dtype={prefix.split()[1]}"
        raise Unavailable(f"decode=auto: nothing was measured for `{prefix.strip()}` on this device: run {command}")
    user_entries, repo_entries = map(read_table, tables_in_use(device))
    entry = (repo_entries | user_entries)[widths[nearest(widths, width)]]
    size = nearest(entry["parameters"], batch)
    ms = entry.get("ms", {}).get(size, {})
    names = dict.fromkeys([entry["parameters"][size], *sorted(ms, key=ms.get), "blocks"])
    return [name for name in names if name in impls("decode")]  # a table may name a decoder that no longer exists


def nearest(sizes: Iterable[str], size: int) -> str:
    """Return the one of `sizes` that is nearest to `size` by ratio. If two are equally near, it is the smaller one."""
    return min(sorted(sizes, key=int), key=lambda each: abs(math.log(int(each) / size)))


def first_accepted(names: Iterable[str], construct: Callable[[str], T]) -> T:
    """Return construct(name) of the first decoder that does not refuse, which it does by raising Unavailable.

    If a faster one refuses, a warning has its reason. Raises Unavailable with all reasons if every decoder refuses.
    """
    reasons = []
    for name in names:
        try:
            result = construct(name)
        except Unavailable as reason:
            reasons.append(str(reason))  # the error itself would keep the memory of what it refused
        else:
            if reasons:
                warn(f"decode=auto takes {name}, because what was measured to be faster refuses: {'; '.join(reasons)}")
            return result
    raise Unavailable(f"decode=auto: {'; '.join(reasons)}")


def record_fastest(entry: str, size: int, impl: str, ms: dict[str, float], device: torch.device) -> str:
    """Store in the user's table that `impl` is the fastest at this size. Return a line that says so.

    `ms` is {backend: milliseconds}, and explains the choice.
    """
    path, _ = table_paths(device)
    before = read_table(path).get(entry, {"parameters": {}, "ms": {}})
    added = {"parameters": before["parameters"] | {str(size): impl}, "ms": before["ms"] | {str(size): ms}}
    write_table(path, {entry: added})
    times = ", ".join(f"{name} {value:.3f} ms" for name, value in sorted(ms.items(), key=lambda item: item[1]))
    return f"auto     {entry} {size}: {impl} ({times})"
