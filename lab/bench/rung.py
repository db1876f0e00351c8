"""Measure a rung of course/: compare it with float64, and time it beside PyTorch, torch.compile and the floor.

A rung is a file with these names. An op's contract has the same ones: kernels/norm/__init__.py explains them.

    KERNELS        name -> function(**inputs), in the order in which the rung explains them; the last is the result
    SHAPES         "gpu" and "cpu" -> the arguments of inputs() and cost(); no "cpu" if NEEDS is set
    inputs()       (**shape, dtype, device) -> {name: tensor}; if one requires a gradient, the backward is compared, too
    reference()    the formula in plain PyTorch; in float64 it is the exact result
    cost()         (**shape, dtype) -> {"forward": (FLOPs, bytes)}, and "backward" if there is one
    exercise()     the formula of the exercise, in plain PyTorch
    OTHERS         name -> function(**inputs): what else stands in the table, such as F.gelu; may be left out
    FORWARD_ONLY   True if the kernels have no backward, although the op has one
    DTYPE          of the inputs; by default bf16 on a GPU, and fp32 in Triton's interpreter
    show(device)   prints something before the table; may be left out
    NEEDS          "fp8", "nvcc" or "Hopper", if no kernel runs without it

A rung that computes an op has OP = "norm" instead of inputs(), reference() and cost(): the contract has them.
"""

import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from tabulate import tabulate
from torch import Tensor
from torch.utils.cpp_extension import CUDA_HOME

from kernels.check import broken_rule, outputs_and_gradients
from kernels.fp8 import E4M3, E5M2, choose_ptxas
from kernels.gpu import gpu_unavailable, is_hopper
from kernels.lookup import import_file, module_name
from kernels.registry import contract, load
from lab.bench.op import forward_and_backward, largest_error, make_copy, outputs, random_gradients
from runtime.config import UserError
from runtime.device import environment, select_device
from runtime.meter import quantiles
from runtime.timing import measured_flops, time_in_turns

COURSE = Path(__file__).resolve().parents[2] / "course"
ROUNDS = 20
FP8_DTYPES = E4M3, E5M2  # torch.compile needs another ptxas for them: see kernels/fp8.py


def rungs() -> list[Path]:
    """Return the files of the rungs, in order."""
    return sorted(COURSE.glob("[0-9]*.py"))


def measure_main(path: str, *solutions: str) -> None:
    """Measure the rung `path`, which is the main program. With a file, measure the solution of its exercise instead.

    The last line that it prints has the rows as JSON. The program exits with 1 if a result of the rung is wrong.
    """
    if len(solutions) > 1:
        sys.exit(f"error: {' '.join(solutions)}: name one file, with your solution of the exercise")
    rung, device = sys.modules["__main__"], select_device("auto")
    line = {"rung": Path(path).stem, "rows": [], "env": environment(device)}
    if why := why_unavailable(rung, device):
        print(f"{Path(path).name} cannot run here: {why}")
        print(json.dumps(line | {"unavailable": why}))
        return
    if hasattr(rung, "OP"):  # the registry imports backends by their path; this file must not be imported twice
        sys.modules[module_name(rung.OP, path)] = rung
    if hasattr(rung, "show") and not solutions:
        rung.show(device)
    try:
        line["rows"] = run(rung, device, *map(load_solution, solutions))
    except UserError as error:
        sys.exit(f"error: {error}")
    print(table(line["rows"]))
    print(json.dumps(line))
    sys.exit(any(row["wrong"] for row in line["rows"] if row["own"]))


def load_solution(path: str) -> Callable:
    """Return the function `solution` of a file. Raises UserError if there is none."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; the argument is the file with your solution of the exercise")
    solution = getattr(import_file(Path(path), f"solution_{Path(path).stem}"), "solution", None)
    if not callable(solution):
        raise UserError(f"{path} defines no function solution(...): its arguments are those of exercise() in the rung")

    @functools.wraps(solution, updated=())  # see kernels/arguments.py
    def checked_solution(**inputs):
        results = solution(**inputs)
        tensors = results if isinstance(results, tuple) else (results,)
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            names = ", ".join(type(tensor).__name__ for tensor in tensors)
            raise UserError(f"{path}: solution(...) returns {names}; return a tensor, or a tuple of tensors")
        return results

    return checked_solution


def why_unavailable(rung: ModuleType, device: torch.device) -> str | None:
    """Return why no kernel of the rung can run on `device`, or None."""
    needs = getattr(rung, "NEEDS", None)
    if needs == "Hopper" and not is_hopper(device):
        return "it needs a Hopper GPU, of compute capability 9.0"
    if needs == "nvcc" and not (device.type == "cuda" and CUDA_HOME):
        return "it needs an NVIDIA GPU, and nvcc, the CUDA compiler"
    return gpu_unavailable(device, (8, 9)) if needs == "fp8" else None


def run(rung: ModuleType, device: torch.device, solution: Callable | None = None) -> list[dict]:
    """Return a row for each kernel of the rung and for PyTorch; on a GPU also for torch.compile, with times.

    With a solution of the exercise, the solution is the only kernel, and the exercise is the formula. Its floor is not
    known, because cost() is the rung's.
    """
    source = contract(rung.OP) if hasattr(rung, "OP") else rung
    on_gpu = device.type == "cuda"
    shape = rung.SHAPES["gpu" if on_gpu else "cpu"]
    dtype = getattr(rung, "DTYPE", torch.bfloat16 if on_gpu else torch.float32)
    inputs = source.inputs(**shape, dtype=dtype, device=device)
    if getattr(rung, "FORWARD_ONLY", False):
        inputs = {name: value.detach() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    if solution:
        kernels, others, exact, pytorch = {"yours": solution}, {}, rung.exercise, rung.exercise
    else:
        kernels, others, exact = rung.KERNELS, getattr(rung, "OTHERS", {}), source.reference
        pytorch = load(rung.OP, "eager", device) if hasattr(rung, "OP") else rung.reference
    functions = {**kernels, **others, "PyTorch": pytorch}
    if on_gpu:
        functions["torch.compile"] = torch.compile(pytorch, fullgraph=True, dynamic=False)
        if any(out.dtype in FP8_DTYPES for out in outputs(pytorch, inputs)):
            choose_ptxas(device)
    left_out = [name for name in kernels if name.startswith("cuda") and not (on_gpu and CUDA_HOME)]
    if left_out:
        print(f"left out, because it needs a GPU and nvcc: {', '.join(left_out)}")
        functions = {name: function for name, function in functions.items() if name not in left_out}
    rows = [row | {"own": row["kernel"] in kernels} for row in compare(functions, exact, inputs, dtype)]
    if on_gpu:
        works = timed_works(functions, inputs)
        if solution:
            samples = time_in_turns(works, device, ROUNDS)
        else:
            cost = source.cost(**shape, dtype=dtype)
            if getattr(rung, "FORWARD_ONLY", False):
                del cost["backward"]
            bound, samples = time_with_floor(works, cost, dtype, device)
        for row in rows:
            p20, median, p80 = (1e3 * value for value in quantiles(samples[row["kernel"]]))
            row |= {"ms": median, "ms/p20": p20, "ms/p80": p80}
            if not solution:
                row |= {"bound": bound, "of_floor": 1e3 * statistics.median(samples["floor"]) / median}
    return rows


def compare(functions: dict[str, Callable], exact: Callable, inputs: dict, dtype: torch.dtype) -> list[dict]:
    """Return for each function its error, the largest ||result - exact|| / ||exact||, and why it is wrong, or None.

    `exact` in float64 gives the exact results. The rule is that of every backend: see kernels/check.py.
    """
    truth = outputs_and_gradients(exact, inputs, dtype=torch.float64)
    truth = {name: tensor.double() for name, tensor in truth.items()}  # fp8 stays fp8 until here
    eager, rows = outputs_and_gradients(functions["PyTorch"], inputs), []
    for name, function in functions.items():
        results = outputs_and_gradients(function, inputs)
        wrong = broken_rule(results, eager, truth, inputs, dtype)
        error = None if wrong else largest_error(tuple(results[key] for key in truth), tuple(truth.values()))
        rows.append({"kernel": name, "error": error, "wrong": wrong})
    return rows


def timed_works(functions: dict[str, Callable], inputs: dict) -> dict[str, Callable]:
    """Return for each function what is timed: its forward, and its backward if an input requires a gradient."""
    douts = []
    leaves = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad}
    if leaves:
        results = outputs(functions["PyTorch"], inputs)
        douts = random_gradients(results, inputs)
        gradients = torch.autograd.grad(results, list(leaves.values()), douts, allow_unused=True)
        unused = [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is None]
        inputs = inputs | {name: leaves[name].detach() for name in unused}  # an exercise may ignore an argument
    return {name: functools.partial(forward_and_backward, each, inputs, douts) for name, each in functions.items()}


def time_with_floor(
    works: dict[str, Callable], cost: dict, dtype: torch.dtype, device: torch.device
) -> tuple[str, dict[str, list[float]]]:
    """Return what bounds the time, "bytes" or "FLOPs", and {name: seconds, one for each round}.

    The last name is "floor": a copy of as many bytes, or a matmul of as many FLOPs, whichever takes longer here.
    """
    flops, moved = (sum(numbers) for numbers in zip(*cost.values(), strict=True))
    samples = time_in_turns({**works, "floor": make_copy(moved, device)}, device, ROUNDS)
    matmul_seconds = flops / measured_flops(device, dtype)
    if matmul_seconds < statistics.median(samples["floor"]):
        return "bytes", samples
    return "FLOPs", samples | {"floor": [matmul_seconds]}


def table(rows: list[dict]) -> str:
    """Return the rows as text, for the terminal."""
    head, lines = ["kernel", "error"], []
    head += [name for name, key in {"ms": "ms", "of the floor": "of_floor"}.items() if key in rows[0]]
    for row in rows:
        line = [row["kernel"], f"WRONG: {row['wrong']}" if row["wrong"] else f"{row['error']:.1e}"]
        if "ms" in row:
            line.append(f"{row['ms']:.4f} ({row['ms/p20']:.4f} to {row['ms/p80']:.4f})")
        if "of_floor" in row:
            line.append(f"{100 * row['of_floor']:.0f}%")
        lines.append(line)
    return tabulate(lines, head, tablefmt="plain", disable_numparse=True)
