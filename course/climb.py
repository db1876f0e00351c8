"""What all rungs share: compare a rung with float64, and time it beside PyTorch, torch.compile and the floor.

A rung is a file with these names. An op's contract has the same ones: kernels/norm/__init__.py explains them.

    KERNELS        name -> function(**inputs), in the order in which the rung explains them; the last is the result
    SHAPES         "gpu" and "cpu" -> the arguments of inputs() and cost()
    inputs()       (**shape, dtype, device) -> {name: tensor}; if one requires a gradient, the backward is compared, too
    reference()    the formula in plain PyTorch; in float64 it is the exact result
    cost()         (**shape, dtype) -> {"forward": (FLOPs, bytes)}, and "backward" if there is one
    exercise()     the formula of the exercise, in plain PyTorch
    OTHERS         name -> function(**inputs): what else stands in the table, such as F.gelu; may be left out
    DTYPE          of the inputs; by default bf16 on a GPU, and fp32 in Triton's interpreter

A rung that computes an op has OP = "norm" instead of inputs(), reference() and cost(): the contract has them. A rung
may have unavailable(device), which returns why none of its kernels can run there, or None.
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[1]
if sys.path[0] == str(ROOT / "course"):  # python course/01_vector_add.py
    sys.path[0] = str(ROOT)

from tabulate import tabulate  # noqa: E402

from kernels.check import broken_rule, outputs_and_gradients  # noqa: E402
from kernels.lookup import module_name  # noqa: E402
from kernels.registry import contract, load  # noqa: E402
from lab.bench.op import forward_and_backward, largest_error, outputs, random_gradients  # noqa: E402
from runtime.device import environment, select_device  # noqa: E402
from runtime.meter import quantiles  # noqa: E402
from runtime.timing import measured_bandwidth, measured_flops, time_in_turns  # noqa: E402

ROUNDS = 20


def climb(path: str) -> None:
    """Run the rung that is the main program. An argument is the file of a solution of its exercise.

    The last line that it prints has the rows as JSON. The program exits with 1 if a result is wrong.
    """
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        environ = os.environ | {"TRITON_INTERPRET": "1"}  # Triton reads it at the first @triton.jit
        os.execve(sys.executable, [sys.executable, *sys.argv], environ)
    rung, solution = sys.modules["__main__"], sys.argv[1] if len(sys.argv) > 1 else None
    device = select_device("auto")
    if why := getattr(rung, "unavailable", lambda device: None)(device):
        print(f"{Path(path).name} cannot run here: {why}")
        return
    if hasattr(
        rung, "OP"
    ):  # a custom operator exists once, so the file must not be imported again under its other name
        sys.modules[module_name(rung.OP, path)] = rung
    rows = run(rung, device, load_file(solution).solution if solution else None)
    print(table(rows))
    print(json.dumps({"rung": Path(path).stem, "rows": rows, "env": environment(device)}))
    sys.exit(any(row["wrong"] for row in rows))


def load_file(path: str | Path) -> ModuleType:
    """Import a file by its path, such as one of the rungs, whose names begin with a digit."""
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", f"course_{Path(path).stem}"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(rung: ModuleType, device: torch.device, solution: Callable | None = None) -> list[dict]:
    """Return a row for each kernel of the rung and for PyTorch; on a GPU also for torch.compile, with times.

    With a solution of the exercise, the solution is the only kernel, and the exercise is the formula.
    """
    source = contract(rung.OP) if hasattr(rung, "OP") else rung
    on_gpu = device.type == "cuda"
    shape = rung.SHAPES["gpu" if on_gpu else "cpu"]
    dtype = getattr(rung, "DTYPE", torch.bfloat16 if on_gpu else torch.float32)
    inputs = source.inputs(**shape, dtype=dtype, device=device)
    if solution:
        kernels, exact, pytorch = {"yours": solution}, rung.exercise, rung.exercise
    else:
        pytorch = load(rung.OP, "eager", device) if hasattr(rung, "OP") else rung.reference
        kernels, exact = rung.KERNELS, source.reference
    functions = {**kernels, **getattr(rung, "OTHERS", {}), "PyTorch": pytorch}
    if on_gpu:
        functions["torch.compile"] = torch.compile(pytorch, fullgraph=True, dynamic=False)
    elif any(name.startswith("cuda") for name in kernels):
        print("left out without a GPU:", ", ".join(name for name in kernels if name.startswith("cuda")))
        functions = {name: function for name, function in functions.items() if not name.startswith("cuda")}
    rows = compare(functions, exact, inputs, dtype)
    if on_gpu:
        seconds = floor_seconds(source.cost(**shape, dtype=dtype), dtype, device)
        for row, (p20, median, p80) in zip(rows, time(functions, inputs, device), strict=True):
            row |= {
                "ms": 1e3 * median,
                "ms/p20": 1e3 * p20,
                "ms/p80": 1e3 * p80,
                "of_floor": max(seconds.values()) / median,
            }
            row["bound"] = max(seconds, key=seconds.get)
    return rows


def compare(functions: dict[str, Callable], exact: Callable, inputs: dict, dtype: torch.dtype) -> list[dict]:
    """Return for each function its error, the largest ||result - exact|| / ||exact||, and why it is wrong, or None.

    `exact` in float64 gives the exact results. The rule is that of every backend: see kernels/check.py.
    """
    truth = outputs_and_gradients(exact, inputs, dtype=torch.float64)
    eager, rows = outputs_and_gradients(functions["PyTorch"], inputs), []
    for name, function in functions.items():
        results = outputs_and_gradients(function, inputs)
        wrong = broken_rule(results, eager, truth, inputs, dtype)
        error = largest_error([results[key] for key in truth], list(truth.values())) if not wrong else None
        rows.append({"kernel": name, "error": error, "wrong": wrong})
    return rows


def time(functions: dict[str, Callable], inputs: dict, device: torch.device) -> list[tuple[float, float, float]]:
    """Return (p20, median, p80) of the seconds of each function, forward and backward."""
    works, douts = {}, random_gradients(outputs(functions["PyTorch"], inputs), inputs)
    for name, function in functions.items():
        works[name] = lambda function=function: forward_and_backward(function, inputs, douts)
    return [quantiles(seconds) for seconds in time_in_turns(works, device, ROUNDS).values()]


def floor_seconds(cost: dict[str, tuple[int, int]], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return how long this GPU needs at least for the bytes, at the speed of a copy, and for the FLOPs of matmuls."""
    flops, moved = (sum(numbers) for numbers in zip(*cost.values(), strict=True))
    return {"bytes": moved / measured_bandwidth(device), "FLOPs": flops / measured_flops(device, dtype)}


def table(rows: list[dict]) -> str:
    """Return the rows as text, for the terminal."""
    head, lines = ["kernel", "error"], []
    if "ms" in rows[0]:
        head += ["ms", "of the floor"]
    for row in rows:
        line = [row["kernel"], f"WRONG: {row['wrong']}" if row["wrong"] else f"{row['error']:.1e}"]
        if "ms" in row:
            line += [f"{row['ms']:.4f} ({row['ms/p20']:.4f} to {row['ms/p80']:.4f})", f"{100 * row['of_floor']:.0f}%"]
        lines.append(line)
    return tabulate(lines, head, tablefmt="plain", disable_numparse=True)
