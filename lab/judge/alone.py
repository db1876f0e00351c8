"""Time the op alone, at its shape in the training: windows of calls in a worker, by this process's clock.

The calls take several sets of inputs in turn. At the sizes of a training on a GPU, the sets together do not fit into
the L2 cache. Before each window one set gets new values, and after a random window the results with these values are
compared with eager PyTorch.

On a GPU the calls are replayed from a CUDA graph, as in a training step. Launched one by one, a call of norm=triton
took 1.11 ms instead of 0.24 (124M, H200), because Python was slower than the kernels.
"""

import random
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

WINDOW_SECONDS = 0.05  # of turns, at least one. A turn is a call with each set of inputs
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
    size = sum(tensor.nbytes for tensor in tensors_of(call_inputs(call, 0)).values())
    return min(MOST_SETS, max(2, SETS_BYTES // max(1, size)))


class Windows(NamedTuple):
    """The seconds of a call in each window, and the results of one window with the seed of their inputs."""

    seconds: list[float]
    content: bytes
    seed: int


def time_backend(
    call: Alone, name: str, rounds: int, folder: Path, limit: float
) -> tuple[dict, dict[str, Tensor], tuple[int, int]]:
    """Return (the figures of one backend, the results of a timed call, the seeds of its inputs and gradients)."""
    seed, sets = draw_seed(), count_sets(call)
    row = {"launched/ms": None, "no_graph": None}
    with Sandbox(WORKER, folder, limit) as worker:
        worker.send(("timing", str(call.device), Timing(call.op, name, call.shape, call.dtype, seed, sets)))
        extra = worker.receive().get("extra_gib")
        windows = time_windows(worker, call, sets, rounds)
        if call.device.type == "cuda":
            row["launched/ms"] = 1e3 * quantiles(windows.seconds)[1]
            worker.send(("capture",))
            row["no_graph"] = worker.receive().get("no_graph")
            if row["no_graph"] is None:
                windows = time_windows(worker, call, sets, rounds)
        if changed := worker.changed_files():
            raise Ended(f"it changed files of the repo: {', '.join(changed)}")
    try:
        results = load(windows.content)
    except Exception as error:  # safetensors raises several classes for a damaged file
        raise Ended(f"it wrote no tensors: {error}") from None
    p20, median, p80 = (1e3 * value for value in quantiles(windows.seconds))
    row |= {"both/ms": median, "both/ms/p20": p20, "both/ms/p80": p80}
    return row | {"extra_gib": extra if isinstance(extra, float) else None}, results, (windows.seed, seed)


def time_windows(worker: Sandbox, call: Alone, sets: int, rounds: int) -> Windows:
    """Time `rounds` windows. Raises Ended if the clocks disagree."""

    def window(turns: int) -> tuple[float, float | None]:
        start = time.perf_counter()
        worker.send(("calls", turns))
        answer = worker.receive()
        return time.perf_counter() - start, answer.get("event_seconds")

    def request(*words: object) -> None:
        worker.send(words)
        worker.receive()

    source, clocks = random.SystemRandom(), []
    compared = source.randrange(rounds)
    for _ in range(2):
        single, _ = window(1)
    turns = max(1, min(1000, int(WINDOW_SECONDS / single)))
    for number in range(rounds):
        changed, seed = source.randrange(sets), draw_seed()
        request("inputs", changed, seed)
        clocks.append(window(turns))
        if number == compared:
            request("results", changed, "results")
            size = sum(tensor.nbytes for tensor in tensors_of(call_inputs(call, seed)).values())
            content, compared_seed = worker.read_file("results", HEADROOM + 16 * size), seed
    if reason := clocks_disagree(clocks):
        raise Ended(reason)
    return Windows([host / (turns * sets) for host, _ in clocks], content, compared_seed)


def clocks_disagree(windows: list[tuple[float, float | None]]) -> str | None:
    """Return why the GPU's events do not agree with the judge's clock; None if they agree, or without events.

    `windows` are (host seconds, event seconds or None).
    """
    long = [(host, event) for host, event in windows if isinstance(event, float) and host > EVENTS_FROM]
    if not long:
        return None
    ratios = sorted(host / max(event, 1e-9) for host, event in long)
    middle = ratios[len(ratios) // 2]
    if middle <= EVENTS_AGREE:
        return None
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
    torch.manual_seed(gradients_seed)
    douts = random_gradients(outputs(eager, inputs), inputs)
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
