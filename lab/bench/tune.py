"""Search for the fastest launch parameters of a kernel.

The op runs once, which shows the kernels that look up parameters (kernels/tuned.py). The op's Triton file lists
candidates. On a GPU, threads compile all candidates of a kernel at the same time. The candidates that fit the GPU and
give the default's results are timed in turns. The fastest is chosen if its median is below the default's p20. Several
shapes may share an entry of the table, because the entry's name has only widths and dtypes. The candidate with the
smallest product of medians over these shapes is then chosen, if this product is below the product of the default's p20.
"""

import json
import math
import time
from collections.abc import Iterator
from functools import partial

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.registry import backend, contract, load
from kernels.tuned import override_tables
from lab.bench.compile_ahead import launches_only_compile
from lab.bench.op import DTYPES, forward_and_backward, outputs, random_gradients
from runtime.meter import quantiles
from runtime.timing import time_in_turns

UNFIT = (OutOfResources, PTXASError)  # the parameters need more than the GPU has


class Budget:
    """The time for a search. A kernel has its turn only if the longest turn so far would end in time."""

    def __init__(self, minutes: float = math.inf):
        self.end, self.longest, self.not_tried = time.monotonic() + 60 * minutes, 0.0, []

    def allows(self, name: str) -> bool:
        """Return whether there is time for another kernel. If not, `name` is among those that were not tried."""
        if time.monotonic() + self.longest < self.end:
            return True
        self.not_tried.append(name)
        return False

    def spent_since(self, start: float) -> None:
        self.longest = max(self.longest, time.monotonic() - start)


def search_order(shapes: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Return the (op, shape) of a search through {op: its shapes}: the first shape of every op, then the second.

    Ops of matmuls come first, because they take most of a step.
    """
    ops = sorted(shapes, key=lambda op: contract(op).BOUND != "flops")
    longest = max(map(len, shapes.values()))
    return [(op, shapes[op][turn]) for turn in range(longest) for op in ops if turn < len(shapes[op])]


def tune_shape(
    op: str, shape_name: str, dtype_name: str, rounds: int, device: torch.device, budget: Budget
) -> Iterator[dict]:
    """Yield a row for each kernel that the op launches at this shape: table entry, best parameters, all timings.

    The kernels for which the budget has no time are named in it.
    """
    if not budget.allows(f"{op} at {shape_name}"):
        return
    module, dtype = contract(op), DTYPES[dtype_name]
    inputs = module.inputs(**(module.SHAPES | module.CASES)[shape_name], dtype=dtype, device=device)
    function, candidates = load(op, "triton", device), backend(op, "triton").candidates
    with override_tables({}) as requests:
        douts = random_gradients(outputs(function, inputs), inputs)
        forward_kernels = list(requests)
        expected = forward_and_backward(function, inputs, douts)
    best = {}  # kernel -> its best parameters, for the kernels before this one

    def run(way: str, kernel: str, parameters: dict) -> tuple:
        """Return the outputs, or with way="both" (outputs, gradients), with these parameters of one kernel."""
        with override_tables({**best, kernel: parameters}):
            if way == "forward":
                return outputs(function, inputs)
            return forward_and_backward(function, inputs, douts)

    for kernel, (entry, default) in requests.items():
        if not budget.allows(f"{kernel} at {shape_name}"):
            continue
        start = time.monotonic()
        way = "forward" if kernel in forward_kernels else "both"
        all_parameters = (default, *(default | changes for changes in candidates(kernel, default)))
        distinct = {json.dumps(parameters): parameters for parameters in all_parameters}
        works, rejected = {}, {"does not fit": 0, "is wrong": 0}
        if device.type == "cuda":
            with launches_only_compile():
                for parameters in distinct.values():
                    run("both", kernel, parameters)
        for text, parameters in tqdm(distinct.items(), desc=f"{shape_name} {kernel}", disable=None, leave=False):
            try:
                right = agree(run("both", kernel, parameters), expected, inputs, dtype)
            except UNFIT:
                rejected["does not fit"] += 1
                continue
            if not right:
                rejected["is wrong"] += 1
            if right or parameters == default:
                works[text] = partial(run, way, kernel, parameters)
        samples = time_in_turns(works, device, rounds)
        ms = {text: [1e3 * seconds for seconds in quantiles(times)] for text, times in samples.items()}
        default_text = json.dumps(default)
        row = {"entry": entry, "timed": way, "shape": shape_name, "tried": len(distinct), **rejected}
        row |= {"default": default_text, "p20": ms[default_text][0]}
        row["medians"] = {text: median for text, (_, median, _) in ms.items()}
        row |= choose_parameters([row])
        budget.spent_since(start)
        yield row
        best[kernel] = row["parameters"]


def choose_parameters(rows: list[dict]) -> dict:
    """Return the best parameters for all the shapes of one entry. The milliseconds are sums over the shapes."""
    default = rows[0]["default"]
    common = [text for text in rows[0]["medians"] if all(text in row["medians"] for row in rows)]
    products = {text: math.prod(row["medians"][text] for row in rows) for text in common}
    best = min(common, key=products.get)
    if products[best] >= math.prod(row["p20"] for row in rows):
        best = default
    names = ", ".join(row["shape"] for row in rows)
    ms, default_ms = (round(sum(row["medians"][text] for row in rows), 4) for text in (best, default))
    return {"parameters": json.loads(best), "default_ms": default_ms, "ms": ms, "shape": names}


def agree(results: tuple, expected: tuple, inputs: dict, dtype: torch.dtype) -> bool:
    """Return whether two results are equal but for the order of fp32 sums and the rounding to `dtype`.

    Sums of n terms in two orders differ by about n^1/2 roundings of fp32. Nearly equal numbers may round to neighbours
    in `dtype`. The tolerance is the larger of these two errors, relative to the largest element.
    """
    floating = [value for value in inputs.values() if isinstance(value, Tensor) and value.is_floating_point()]
    terms = max(max(tensor.shape[-1], tensor.numel() // tensor.shape[-1]) for tensor in floating)
    tolerance = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * math.sqrt(terms))
    for group, expected_group in zip(results, expected, strict=True):
        for a, b in zip(group, expected_group, strict=True):
            if not (a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max():
                return False
    return True


def gains(rows: list[dict]) -> list[str]:
    """Return a line for each row and a line for all: the ms before and after. `timed` is the part of the op."""
    lines = [f"{row['entry']}: {change(row['default_ms'], row['ms'])}, {row['timed']}" for row in rows]
    before, after = (sum(row[key] for row in rows) for key in ("default_ms", "ms"))
    faster = sum(row["ms"] < row["default_ms"] for row in rows)
    return [*lines, f"total of {len(rows)} kernels: {change(before, after)}, {faster} faster"]


def change(before: float, after: float) -> str:
    return f"{before:.3f} -> {after:.3f} ms ({before / after:.2f}x)"


def table(rows: list[dict]) -> str:
    """Return the rows as text, for the terminal."""
    head = ["kernel, widths, dtypes", "shape", "timed", "default ms", "best ms", "parameters", "tried"]
    lines = []
    for row in rows:
        tried = str(row["tried"])
        for reason in ("does not fit", "is wrong"):
            if row[reason]:
                tried += f", {row[reason]} {reason}"
        parameters = ", ".join(f"{key} {value}" for key, value in row["parameters"].items())
        times = f"{row['default_ms']:.3f}", f"{row['ms']:.3f}"
        lines.append([row["entry"], row["shape"], row["timed"], *times, parameters, tried])
    return tabulate(lines, head, tablefmt="plain", disable_numparse=True)
