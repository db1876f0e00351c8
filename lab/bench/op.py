"""Measure the backends of an op: time, error and memory, beside the op's ceiling on this machine."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from common.terminal import class_and_message, warn
from kernels.check import convert_floats, out_of_place
from kernels.fp8 import E4M3, choose_ptxas, product
from kernels.registry import (
    KernelError,
    Unavailable,
    backend,
    contract,
    describe,
    impls,
    load,
    unavailable,
)
from runtime.config import check
from runtime.device import GIB, is_out_of_memory, reset_peak_memory
from runtime.meter import quantiles
from runtime.timing import time_in_turns

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ERROR_ROWS = 4096  # rows that are compared with float64, at most
ERROR_QUERIES = 16  # queries of attention that are compared: T x T scores in float64 would fill any memory
UNITS = {"bytes": ("tb_per_s", 2), "flops": ("tflops", 0)}  # the contract's BOUND -> key in a row, digits in a table


@dataclass
class OpConfig:
    """The config of a benchmark of one op."""

    op: str
    shape: Any
    dtype: str
    device: str
    rounds: int
    keep: bool

    def __post_init__(self):
        check(self.dtype in DTYPES, f"dtype={self.dtype}: choose {', '.join(DTYPES)}")
        check(self.rounds >= 1, f"rounds={self.rounds}: it must be at least 1")
        sizes, cases = contract(self.op).SHAPES, contract(self.op).CASES
        shapes = sizes | cases
        on_cpu = self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available())
        # norm at the shape of 124M took 91 s on two cores
        self.shape = as_list(self.shape) or (list(cases)[:1] if on_cpu else list(sizes))
        for name in self.shape:
            check(name in shapes, f"shape={name}: {self.op} has {', '.join(shapes)}")


def as_list(value: Any) -> list[str]:
    """Return the names in a config value that may be null, one name or a list of names."""
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def contestants(op: str, names: list[str], device: torch.device) -> dict[str, Callable]:
    """Return name -> function for the named backends, or without names for every backend that runs here.

    `compile` is eager under torch.compile. Without names it is always included. Raises KernelError if a named backend
    cannot run here.
    """
    backends = names or list(available_backends(op, device))
    functions = {name: load(op, name, device) for name in backends if name != "compile"}
    if "compile" in names or not names:
        functions["compile"] = torch.compile(load(op, "eager", device), fullgraph=True)
    return functions


def available_backends(op: str, device: torch.device) -> Iterator[str]:
    """Yield the backends that can run on `device`. A file that cannot be imported gets a warning instead."""
    for impl in impls(op):
        try:
            reason = unavailable(op, impl, device)
        except KernelError as error:
            warn(error)
            continue
        if not reason:
            yield impl


def backend_of(name: str) -> str:
    """Return the backend behind a contestant."""
    return "eager" if name == "compile" else name


def optional_arguments(op: str, inputs: dict) -> list[str]:
    """Return which arguments of this call a backend of the op may lack."""
    return [name for name in getattr(contract(op), "OPTIONAL", ()) if name in inputs]


def random_gradients(results: tuple[Tensor, ...], inputs: dict) -> list[Tensor]:
    """Return a random gradient of each output.

    In fp8 it has the size of a gradient of a mean over the rows, as in training; a larger one would saturate. A scalar
    (the loss) gets 1, because some backends round gradients to fp8 in the forward.
    """
    if not inputs.get("fp8"):
        return [random_like(out) for out in results]
    means = [out.shape[-1] / out.numel() if out.dim() else 0 for out in results]
    pairs = zip(results, means, strict=True)
    return [random_like(out) * mean if mean else torch.ones_like(out) for out, mean in pairs]


def random_like(tensor: Tensor) -> Tensor:
    """Return normal random numbers of this shape and dtype. They do not depend on the strides, as randn_like()'s do."""
    return torch.randn_like(tensor, memory_format=torch.contiguous_format)


def outputs(function: Callable, inputs: dict) -> tuple[Tensor, ...]:
    result = function(**inputs)
    return result if isinstance(result, tuple) else (result,)


def forward_and_backward(function: Callable, inputs: dict, douts: list[Tensor]) -> tuple:
    """Return (outputs, gradients) of one call. An op without gradients runs forward only."""
    out = outputs(function, inputs)
    leaves = [value for value in inputs.values() if isinstance(value, Tensor) and value.requires_grad]
    if not leaves:
        return out, ()
    return out, torch.autograd.grad(out, leaves, douts)


def errors(
    function: Callable,
    module: ModuleType,
    shape: dict,
    dtype: torch.dtype,
    device: torch.device,
    own_scales: bool = False,
) -> dict:
    """Return the largest error ||result - exact|| / ||exact|| of the outputs, and of the gradients (0 without any).

    `shape` has the arguments of the contract's inputs(). An attention is compared at the last ERROR_QUERIES queries of
    one sequence, and an op of shape (rows, width) or (rows,) in at most ERROR_ROWS rows. With `own_scales`, the exact
    results are those without fp8.
    """
    is_attention = module is contract("attention")
    size = shape["shape"]
    if is_attention:
        size = (1, *size[1:])
    elif len(size) <= 2:  # (rows, width) or (rows,)
        size = (min(size[0], ERROR_ROWS), *size[1:])
    function = out_of_place(module, function)
    inputs = module.inputs(**shape | {"shape": size}, dtype=dtype, device=device)
    exact_inputs = convert_floats(inputs, torch.float64)
    if own_scales:
        exact_inputs.pop("fp8", None)
    douts = random_gradients(outputs(function, inputs), inputs)
    if is_attention:
        results, truth = last_queries(function, module.reference, inputs, exact_inputs, douts[0])
    else:
        results = forward_and_backward(function, inputs, douts)
        truth = forward_and_backward(module.reference, exact_inputs, [dout.double() for dout in douts])
    return {
        name: largest_error(result, exact)
        for name, result, exact in zip(("error/out", "error/gradients"), results, truth, strict=True)
    }


def largest_error(results: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """Return the largest ||result - exact|| / ||exact||.

    An exact result may be zero, for example dq if each query sees one key. Its error is then divided by the largest
    ||exact|| of the other results.
    """
    scales = [tensor.norm().item() for tensor in exact]
    scales = [scale if scale > 1e-12 else max(*scales, 1e-30) for scale in scales]
    differences = [(a.double() - b).norm().item() for a, b in zip(results, exact, strict=True)]
    ratios = [difference / scale for difference, scale in zip(differences, scales, strict=True)]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=0.0)  # max() may skip a NaN


def last_queries(function: Callable, reference: Callable, inputs: dict, exact: dict, dout: Tensor) -> tuple:
    """Return (outputs, gradients) of `function` at the last queries, and the same of `reference`.

    `dout` is set to zero at all other queries. Without a window and without documents the last query sees every key, so
    every key and value gets a gradient.
    """
    n = min(ERROR_QUERIES, dout.shape[1])
    dout[:, :-n] = 0
    results, gradients = forward_and_backward(function, inputs, [dout])
    last = {"q": exact["q"].detach()[:, -n:].requires_grad_()}
    if "starts" in exact:
        last["starts"] = exact["starts"][:, -n:]
    truth = forward_and_backward(reference, exact | last, [dout[:, -n:].double()])
    dq, dk, dv = gradients
    return ((results[0][:, -n:],), (dq[:, -n:], dk, dv)), truth


def status_of(error: Exception) -> str:
    """Return a contestant's status: "unavailable: ...", "wrong: ...", "oom: ..." or "failed: ..."."""
    if isinstance(error, KernelError) and hasattr(error, "status"):  # a library's error may have a `status`, too
        return f"{error.status}: {error}"
    return f"{'oom' if is_out_of_memory(error) else 'failed'}: {class_and_message(error)}"


def is_counted(op: str, impl: str) -> bool:
    """Return whether PyTorch's allocator counts the backend's memory: not if another library computes."""
    return not hasattr(backend(op, impl), "RUNTIME")


def extra_memory(function: Callable, inputs: dict, douts: list[Tensor], device: torch.device) -> float | None:
    """Return the peak GiB of forward and backward besides inputs, outputs and gradients; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    reset_peak_memory(device)
    before = torch.cuda.memory_allocated(device)
    results = forward_and_backward(function, inputs, douts)
    storages = [tensor.untyped_storage() for group in results for tensor in group if tensor is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}  # two gradients may be one tensor
    return (torch.cuda.max_memory_allocated(device) - before - sum(sizes.values())) / GIB


def floors(module: ModuleType, shape: dict, dtype: torch.dtype, device: torch.device) -> dict[str, Callable]:
    """Return the work that no backend can beat: the op's bare matmuls, or a copy of as many bytes as the op moves.

    The matmuls are the contract's products(), with operands in fp8 if the shape has `fp8`. Without products(), an op
    whose BOUND is "bytes" has the copy, and an op whose BOUND is "flops" has no floor.
    """
    works, cost = {}, module.cost(**shape, dtype=dtype)
    for way in cost:
        if hasattr(module, "products"):
            sizes = module.products(**shape)[way]
            works[f"floor {way}"] = make_matmuls(sizes, shape.get("fp8", False), dtype, device)
        elif module.BOUND == "bytes":
            works[f"floor {way}"] = make_copy(cost[way][1], device)
    return works


def make_matmuls(
    sizes: list[tuple[int, int, int]], fp8: bool, dtype: torch.dtype, device: torch.device
) -> Callable[[], list[Tensor]]:
    """Return a function that multiplies (m, k) by (k, n) for each (m, k, n) in `sizes`."""
    if fp8:
        pairs = [[torch.randn(*size, device=device).to(E4M3) for size in ((m, k), (n, k))] for m, k, n in sizes]
        units = [torch.ones((), device=device) for _ in range(2)]  # at multiples of 16 bytes, for cuBLAS
        return lambda: [product(*pair, units, dtype) for pair in pairs]
    pairs = [[torch.randn(*size, device=device).to(dtype) for size in ((m, k), (k, n))] for m, k, n in sizes]
    return lambda: [a @ b for a, b in pairs]


def make_copy(moved: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that moves so many bytes: it reads one half and writes the other."""
    source = torch.randint(256, (moved // 2,), dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def measure(
    op: str,
    shape_name: str,
    shape: dict,
    names: list[str],
    dtype_name: str,
    rounds: int,
    device: torch.device,
    left_out: Collection[str] = (),
) -> tuple[list[dict], dict[str, str]]:
    """Return (the rows of one shape, name -> the status of a backend without a row: status_of() its error).

    `shape` has the arguments of the contract's inputs(). If `names` are given, the first one that cannot take this
    shape raises its error. Contestants in `left_out` are not called.
    """
    module, dtype = contract(op), DTYPES[dtype_name]
    inputs = module.inputs(**shape, dtype=dtype, device=device)
    works, facts, douts, reasons = {}, {}, [], {}
    for name, function in contestants(op, names, device).items():
        if name in left_out:
            continue
        try:
            load(op, backend_of(name), device, optional_arguments(op, inputs))
            if name == "compile" and inputs.get("fp8") and (reason := choose_ptxas(device)):
                raise Unavailable(f"torch.compile in fp8 cannot run here: {reason}")
            douts = douts or random_gradients(outputs(out_of_place(module, function), inputs), inputs)
            own_scales = getattr(backend(op, backend_of(name)), "OWN_SCALES", False)
            row_errors = errors(function, module, shape, dtype, device, own_scales)
            extra = extra_memory(function, inputs, douts, device)
        except Exception as reason:  # a library's kernel may raise anything; the others go on
            if names:
                raise
            reasons[name] = status_of(reason)
            continue
        facts[name] = {**row_errors, "extra_gib": extra if is_counted(op, backend_of(name)) else None}
        works[f"{name} forward"] = partial(outputs, function, inputs)
        works[f"{name} both"] = partial(forward_and_backward, function, inputs, douts)
    works = floors(module, shape, dtype, device) | works
    samples = {work: quantiles(seconds) for work, seconds in time_in_turns(works, device, rounds).items()}
    cost, rows = module.cost(**shape, dtype=dtype), []
    for name in facts:
        row = {"op": op, "shape": shape_name, "impl": name, "dtype": dtype_name, "status": "ok"}
        row["executed"] = describe(op, backend_of(name), **shape, dtype=dtype, device=device)
        rows.append({**row, **speeds(name, samples, cost), **facts[name]})
    return rows, reasons


def speeds(name: str, samples: dict[str, tuple[float, float, float]], cost: dict) -> dict:
    """Return milliseconds, rates, and the share of the floor, for the forward, for both ways, and for the backward.

    `samples` is work -> (p20, median, p80) in seconds. The time of the backward is the time of both ways minus the time
    of the forward. An op without gradients has a cost of the forward only, and `both` is the forward.
    """
    figures, times = {}, {way: samples[f"{name} {way}"] for way in ("forward", "both")}
    if "backward" in cost:
        times["backward"] = tuple(both - forward for both, forward in zip(times["both"], times["forward"], strict=True))
    for way, (p20, median, p80) in times.items():
        ways = tuple(cost) if way == "both" else (way,)
        flops = sum(cost[part][0] for part in ways)
        moved_bytes = sum(cost[part][1] for part in ways)
        figures |= {f"{way}/ms": 1e3 * median, f"{way}/ms/p20": 1e3 * p20, f"{way}/ms/p80": 1e3 * p80}
        figures |= {f"{way}/tflops": flops / median / 1e12, f"{way}/tb_per_s": moved_bytes / median / 1e12}
        figures |= {f"{way}/floor_ms": None, f"{way}/of_floor": None}
        if f"floor {ways[0]}" in samples:
            floor = sum(samples[f"floor {part}"][1] for part in ways)
            figures |= {f"{way}/floor_ms": 1e3 * floor, f"{way}/of_floor": floor / median}
    return figures
