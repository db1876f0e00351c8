"""Time the op alone, at its shape in the training: windows of calls in a worker, by this process's clock.

The calls take several sets of inputs in turn. At the sizes of a training on a GPU, the sets together do not fit into
the L2 cache. Before each window, one set gets new values. The results of this set in the last window are compared with
eager PyTorch.

On a GPU a CUDA graph replays the calls, as in a training step. When Python launches each call, norm=triton takes 0.96
ms instead of 0.20 (124M, H200), because Python is slower than the kernels.
"""

import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor

from kernels.check import convert_floats
from kernels.registry import contract
from kernels.registry import load as load_backend
from lab.bench.op import floors, forward_and_backward, largest_error, outputs, random_gradients
from lab.judge.cases import HEADROOM, WORKER, draw_seed
from lab.judge.op_worker import Timing, tensors_of
from lab.judge.sandbox import Ended, Sandbox
from runtime.meter import quantiles
from runtime.timing import time_in_turns

WINDOW_SECONDS = 0.05  # of a window. It has at least one turn, which calls the op once with each set of inputs
MOST_SETS, SETS_BYTES = 4, 2**28  # of inputs; the L2 cache of an H100 has 50 MiB
EVENTS_AGREE = 1.1  # at most: host seconds / event seconds, in windows of more than EVENTS_FROM host seconds
EVENTS_FROM = 0.02
NAMES = "out", "gradient"  # of the results of a call


class Alone(NamedTuple):
    """The op's call in a training step."""

    op: str
    shape: dict
    dtype: torch.dtype
    device: torch.device


def benchmark(call: Alone, names: list[str], rounds: int, folder: Path, limit: float) -> list[dict]:
    """Return the figures of the backends, one after the other. Raises Ended if a worker fails."""
    floor = floor_seconds(call, rounds)
    rows = []
    for number, name in enumerate(names):
        row, results, seeds = time_backend(call, name, rounds, folder / str(number), limit)
        row |= {"impl": name, "both/floor_ms": None if floor is None else 1e3 * floor}
        row["both/of_floor"] = None if floor is None else 1e3 * floor / row["both/ms"]
        rows.append(row | compare_results(call, results, *seeds))
    return rows


def count_sets(call: Alone) -> int:
    return min(MOST_SETS, max(2, SETS_BYTES // max(1, input_bytes(call))))


def input_bytes(call: Alone) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(call_inputs(call, 0)).values())


def time_backend(
    call: Alone, name: str, rounds: int, folder: Path, limit: float
) -> tuple[dict, dict[str, Tensor], tuple[int, int]]:
    """Return (the figures of one backend, the results of a timed call, the seeds of its inputs and gradients)."""
    seed, sets, row = draw_seed(), count_sets(call), {"launched/ms": None, "no_graph": None}
    most_bytes = HEADROOM + 16 * input_bytes(call)
    with Sandbox(WORKER, folder, limit) as worker:
        work = Timing(call.op, name, call.shape, call.dtype, seed, sets)
        extra = worker.ask("timing", str(call.device), work).get("extra_gib")
        seconds, compared, inputs_seed = time_windows(worker, sets, rounds, call.device)
        if call.device.type == "cuda":
            row["launched/ms"] = 1e3 * quantiles(seconds)[1]
            reason = worker.ask("capture").get("no_graph")
            if reason is None:
                seconds, compared, inputs_seed = time_windows(worker, sets, rounds, call.device)
            else:
                row["no_graph"] = str(reason)[:300]
        replaced = worker.ask("results", compared, "results").get("replaced")
        content = worker.read_file("results", most_bytes)
        (worker.folder / "results").unlink(missing_ok=True)
        if changed := worker.changed_files():
            raise Ended(f"it changed files of the repo: {', '.join(changed)}")
    if replaced:
        raise Ended(f"it replaced {', '.join(map(str, replaced))}")
    try:
        results = load(content)
    except Exception as error:  # safetensors raises several classes for a damaged file
        raise Ended(f"it wrote no tensors: {error}") from None
    p20, median, p80 = (1e3 * value for value in quantiles(seconds))
    row |= {"both/ms": median, "both/ms/p20": p20, "both/ms/p80": p80}
    return row | {"extra_gib": extra if isinstance(extra, float) else None}, results, (inputs_seed, seed)


def time_windows(worker: Sandbox, sets: int, rounds: int, device: torch.device) -> tuple[list[float], int, int]:
    """Time windows of turns, `rounds` of them or up to twice as many.

    Return (the seconds of a call in each window, the set of inputs that changed last, the seed of its values). The
    worker does not know the number of windows, and the judge compares results of the last one. Raises Ended if the
    clocks disagree.
    """

    def window(turns: int) -> tuple[float, object]:
        start = time.perf_counter()
        event = worker.ask("calls", turns).get("event_seconds")
        return time.perf_counter() - start, event

    source, clocks = random.SystemRandom(), []
    turns = max(1, min(1000, int(WINDOW_SECONDS / min(window(1)[0] for _ in range(2)))))
    for _ in range(rounds + source.randrange(rounds)):
        changed, seed = source.randrange(sets), draw_seed()
        worker.ask("inputs", changed, seed)
        clocks.append(window(turns))
    if device.type == "cuda" and (reason := clocks_disagree(clocks)):
        raise Ended(reason)
    return [host / (turns * sets) for host, _ in clocks], changed, seed


def clocks_disagree(windows: list[tuple[float, object]]) -> str | None:
    """Return why the GPU's events do not agree with the judge's clock; None if they agree.

    `windows` are (host seconds, event seconds as the worker says).
    """
    ratios = []
    for host, event in windows:
        if not isinstance(event, float) or not 0 < event <= host:
            return f"it sent event seconds of {str(event)[:20]} for a window of {host:.3g} s"
        if host > EVENTS_FROM:
            ratios.append(host / event)
    if not ratios or statistics.median(ratios) <= EVENTS_AGREE:
        return None
    middle = statistics.median(ratios)
    return f"its calls take {middle:.2f} x as long by the judge's clock as by the events in its stream"


def call_inputs(call: Alone, seed: int) -> dict:
    return contract(call.op).inputs(**call.shape, dtype=call.dtype, device=call.device, seed=seed)


def floor_seconds(call: Alone, rounds: int) -> float | None:
    """Return the seconds of the work that no backend can beat, measured in this process; None without a floor."""
    works = floors(contract(call.op), call.shape, call.dtype, call.device)
    if not works:
        return None
    samples = time_in_turns(works, call.device, rounds)
    del works
    if call.device.type == "cuda":
        torch.cuda.empty_cache()
    return sum(quantiles(values)[1] for values in samples.values())


def compare_results(call: Alone, results: dict[str, Tensor], inputs_seed: int, gradients_seed: int) -> dict[str, float]:
    """Return the errors of the timed call's results, and of eager's, relative to their norms.

    The reference is eager PyTorch in float64, and on a GPU in fp32, because float64 would fill its memory. Raises Ended
    if the results have other names or shapes.
    """
    inputs = call_inputs(call, inputs_seed)
    eager = load_backend(call.op, "eager", call.device)
    eager_outputs = outputs(eager, inputs)
    torch.manual_seed(gradients_seed)
    douts = random_gradients(eager_outputs, inputs)
    exact_dtype = torch.float32 if call.device.type == "cuda" else torch.float64
    exact = {name: value for name, value in convert_floats(inputs, exact_dtype).items() if name != "fp8"}
    eager_results = forward_and_backward(eager, inputs, douts)
    truth = forward_and_backward(eager, exact, [dout.to(exact_dtype) for dout in douts])
    shapes = {f"{name}{i}": t.shape for group, name in zip(truth, NAMES, strict=True) for i, t in enumerate(group)}
    if {name: tensor.shape for name, tensor in results.items()} != shapes:
        raise Ended("its timed calls gave other results than those of the contract")
    figures = {}
    for group, name, key in zip((0, 1), NAMES, ("error/out", "error/gradients"), strict=True):
        given = tuple(results[f"{name}{i}"].to(call.device) for i in range(len(truth[group])))
        figures[key] = largest_error(given, tuple(t.double() for t in truth[group]))
        figures[f"{key}/eager"] = largest_error(eager_results[group], tuple(t.double() for t in truth[group]))
    if call.device.type == "cuda":
        torch.cuda.empty_cache()
    return figures
