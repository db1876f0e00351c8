"""The program of a worker that calls one backend alone, for its cases or for windows of calls that the judge times.

Nothing here decides anything. The results go to the judge (cases.py, alone.py), which never imports the backend.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.terminal import class_and_message
from kernels.check import out_of_place, outputs_and_gradients, poisoned_memory
from kernels.compat import inductor_options
from kernels.registry import Unavailable, backend, contract, describe, load
from lab import compat
from lab.bench.op import (
    backend_of,
    contestants,
    extra_memory,
    forward_and_backward,
    is_counted,
    optional_arguments,
    outputs,
    random_gradients,
)
from lab.bench.probe import Probe, interpreter_lacks
from lab.channel import Channel
from lab.tampering import find_functions, process_settings, replaced_functions
from runtime.device import is_out_of_memory, select_device
from runtime.timing import synchronize

# The calls of a case: name -> (what the call does, which of the two inputs it gets). All calls but the last get their
# input in the same tensors
CALLS = {
    "first": ("gradients", 0),
    "second": ("gradients", 1),
    "third": ("gradients", 0),
    "no_grad": ("no_grad", 1),
    "inference": ("inference", 0),
    "elsewhere": ("gradients", 1),
}


class Case(NamedTuple):
    """A probe, the seeds of its two inputs, and the name of the file for its results in the worker's folder."""

    probe: Probe
    seeds: tuple[int, int]
    file: str


class Timing(NamedTuple):
    """The call of a training step, to be timed. `impl` may be "compile", which is eager under torch.compile."""

    op: str
    impl: str
    shape: dict
    dtype: torch.dtype
    seed: int  # of the gradients of the outputs, and of the first inputs
    sets: int  # of inputs, which the calls take in turn


def main() -> None:
    channel = Channel()
    kind, device, work = channel.receive()
    device = torch.device(device)
    torch.set_num_threads(1 if kind == "cases" else torch.get_num_threads())
    compat.compile_without_workers()
    select_device(str(device))
    functions = find_functions()
    if kind == "cases":
        for case in work:
            facts = answer_case(channel, case, device)
            channel.answer(**facts, replaced=replaced_functions(functions)[:10])
    else:
        time_calls(channel, work, device)


def answer_case(channel: Channel, case: Case, device: torch.device) -> dict:
    """Run the calls of a case and write their results. Return facts about the backend.

    If a call fails, return {"unavailable", "undecided" or "failed": why}.
    """
    op, impl = case.probe.op, case.probe.impl
    try:
        state = global_state(device)
        tensors = dict(run_calls(case, device))
        module = backend(op, impl)
        facts = {
            "executed": describe(op, impl, **case.probe.shape, dtype=case.probe.dtype, device=device),
            "deterministic": bool(getattr(module, "deterministic", True)),
            "own_scales": bool(getattr(module, "OWN_SCALES", False)),
            "runs": kernel_patterns(module),
            "changed": [name for name, value in global_state(device).items() if value != state[name]],
        }
    except Unavailable as reason:
        return {"unavailable": str(reason)}
    except Exception as error:  # a stranger's code may raise any exception
        return {"undecided" if is_out_of_memory(error) else "failed": class_and_message(error)[:300]}
    channel.write(case.file, tensors)
    return facts


def kernel_patterns(module: ModuleType) -> list[str]:
    """Return the patterns in a backend's RUNS, for the names of the kernels that it claims to run."""
    runs = getattr(module, "RUNS", ())
    groups = runs.values() if isinstance(runs, dict) else [runs]
    return [pattern for group in groups for pattern in group]


def run_calls(case: Case, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield ("call/name", tensor) for the results of each of CALLS, and ("inputs/name", tensor) after all calls.

    All calls but the last get their inputs in the same tensors. So a backend that recognises an input by its address
    gives the result of another call. The last call gets other tensors, which a replayed CUDA graph does not read. All
    results are read after the last call, so a buffer that a later call writes to has the wrong content.
    Raises Unavailable if the backend refuses the case, and TypeError if a result is not a plain tensor.
    """
    probe, module = case.probe, contract(case.probe.op)
    if reason := interpreter_lacks(probe):
        raise Unavailable(reason)
    shape = {**probe.shape, "dtype": probe.dtype, "device": device}
    values = [module.inputs(**shape, seed=seed) for seed in case.seeds]
    inputs = module.inputs(**shape, seed=case.seeds[0])
    function = out_of_place(module, load(probe.op, probe.impl, device, needs=optional_arguments(probe.op, inputs)))
    if probe.compiled:
        outputs_and_gradients(function, inputs)  # torch.compile would hide Unavailable
        function = torch.compile(function, fullgraph=True, options=inductor_options())
    results = {}
    for call, (way, number) in CALLS.items():
        arguments = values[number] if call == "elsewhere" else overwrite(inputs, values[number])
        with poisoned_memory() if not probe.compiled else nullcontext():
            results[call] = call_once(function, arguments, way, case.seeds[number])
        addresses = {storage_address(tensor) for tensor in tensors_of(arguments).values()}
        for name, tensor in results[call].items():  # an output may be an input, which the next call overwrites
            if type(tensor) is Tensor and storage_address(tensor) in addresses:
                results[call][name] = tensor.clone()
    synchronize(device)
    for call, tensors in results.items():
        for name, tensor in tensors.items():
            if type(tensor) is not Tensor:
                raise TypeError(f"{name} is a {type(tensor).__name__} instead of a plain torch.Tensor")
            yield f"{call}/{name}", tensor
    for name, tensor in tensors_of(inputs).items():
        yield f"inputs/{name}", tensor  # as the call in inference mode left them


def overwrite(inputs: dict, values: dict) -> dict:
    """Copy the values into the tensors of `inputs`, and return `inputs`.

    The version counters of floats stay as they are. The counters of indices change, because an honest backend may keep
    a mask until its lengths change.
    """
    with torch.no_grad():
        for name, tensor in tensors_of(inputs).items():
            (tensor.data if tensor.is_floating_point() else tensor).copy_(values[name])
    return inputs


def call_once(function: Callable, inputs: dict, way: str, seed: int) -> dict[str, Tensor]:
    if way == "gradients":
        return outputs_and_gradients(function, inputs, seed=seed)
    with torch.no_grad() if way == "no_grad" else torch.inference_mode():
        return {f"out{i}": tensor for i, tensor in enumerate(outputs(function, inputs))}


def tensors_of(inputs: dict) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def global_state(device: torch.device) -> dict[str, Any]:
    """Return the settings of the process that a kernel must not change: {name: value}."""
    generators = {"random numbers": torch.default_generator.get_state().sum().item()}
    if device.type == "cuda":
        generators["random numbers of the GPU"] = torch.cuda.get_rng_state(device).sum().item()
    return (
        generators
        | process_settings()
        | {
            "TF32 in matmuls": torch.backends.cuda.matmul.allow_tf32,
            "TF32 in cuDNN": torch.backends.cudnn.allow_tf32,
            "precision of matmuls": torch.get_float32_matmul_precision(),
            "reductions in bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "gradients": torch.is_grad_enabled(),
        }
    )


def time_calls(channel: Channel, work: Timing, device: torch.device) -> None:
    """Answer the judge's requests, until it ends this process.

    ("inputs", set, seed)    give a set of inputs the values of this seed
    ("calls", turns)         make so many turns, and wait for the device. A turn calls the op once with each set
    ("capture",)             from now on, replay the calls of a turn from a CUDA graph; or answer why this is impossible
    ("results", set, file)   write the results of the last call with this set
    """
    functions = find_functions()
    module = contract(work.op)
    shape = {**work.shape, "dtype": work.dtype, "device": device}
    sets = [module.inputs(**shape, seed=work.seed + number) for number in range(work.sets)]
    [function] = contestants(work.op, [work.impl], device).values()
    load(work.op, backend_of(work.impl), device, optional_arguments(work.op, sets[0]))
    first = outputs(function, sets[0])  # compiles and tunes, which may draw random numbers
    torch.manual_seed(work.seed)
    douts = random_gradients(first, sets[0])
    del first
    results: list[Any] = [None] * work.sets

    def turn() -> None:
        for number, inputs in enumerate(sets):
            out, gradients = forward_and_backward(function, inputs, douts)
            # detach() frees autograd's nodes. They keep the stream of their call, and a capture uses another stream
            results[number] = [tensor.detach() for tensor in out], gradients

    calls = turn
    calls()  # compiles and tunes the backward, which takes memory, too
    extra = extra_memory(function, sets[0], douts, device)
    channel.answer(extra_gib=extra if is_counted(work.op, backend_of(work.impl)) else None)
    while True:
        facts, (kind, *request) = {}, channel.receive()
        if kind == "inputs":
            number, seed = request
            overwrite(sets[number], module.inputs(**shape, seed=seed))
            synchronize(device)
        elif kind == "calls":
            facts["event_seconds"] = repeat_calls(calls, *request, device)
        elif kind == "capture":
            try:
                calls = captured(turn)
            except Exception as error:  # a stranger's code may raise any exception
                # the end of the capture raises a second error, and its context is the first one, which is the reason
                facts["no_graph"] = class_and_message(error.__context__ or error)[:300]
        elif kind == "results":
            number, file = request
            named = {}
            for group, name in zip(results[number], ("out", "gradient"), strict=True):
                named |= {f"{name}{i}": tensor for i, tensor in enumerate(group)}
            channel.write(file, named)
            facts["replaced"] = replaced_functions(functions)[:10]
        channel.answer(**facts)


def repeat_calls(calls: Callable[[], None], turns: int, device: torch.device) -> float | None:
    """Return the seconds of the turns by events in the GPU's stream; None on a CPU."""
    is_gpu = device.type == "cuda"
    start, end = (torch.cuda.Event(enable_timing=True) if is_gpu else None for _ in range(2))
    if is_gpu:
        start.record()
    for _ in range(turns):
        calls()
    if is_gpu:
        end.record()
    synchronize(device)
    return start.elapsed_time(end) / 1e3 if is_gpu else None


def captured(turn: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays all kernels of a turn from a CUDA graph, in one launch."""
    gc.collect()  # as model/capture.py does
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        turn()
    return graph.replay


if __name__ == "__main__":
    main()
