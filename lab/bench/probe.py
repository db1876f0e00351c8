"""Test whether a backend runs here and is right, in processes that the backend may crash.

A probe has a status: "ok: what ran", "unavailable: why" (the backend raised Unavailable), "wrong: by how much",
"failed: how", or "undecided: why" (the time or the memory did not suffice, which says nothing about the backend).
"""

import multiprocessing
import os
import signal
import tempfile
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import Tensor

from common.files import read_bytes
from kernels.check import broken_rule, out_of_place, outputs_and_gradients, why_wrong
from kernels.compat import inductor_options
from kernels.registry import Unavailable, backend, contract, describe, is_silent_triton, load, unavailable
from lab import compat
from lab.bench.op import optional_arguments
from runtime.device import is_out_of_memory, select_device, usable_cores

ENDED = "failed", "undecided"  # with these statuses, the process of the probe ends
ERRORS = "wrong", *ENDED
PROBE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROCESSES = max(4, usable_cores() // 2)  # at a time; on a GPU each has a CUDA context, which takes memory
# The fork server imports these once, for all processes: this module, what it needs, and what scripts/doctor.py needs
PRELOAD = ["lab.bench.probe", "lab.bench.machine", "lab.bench.support", "lab.rows", compat.INDUCTOR_CONFIG]


class Probe(NamedTuple):
    """One test of a backend: is it right for inputs(**shape) of this dtype?"""

    op: str
    impl: str
    shape: dict
    dtype: torch.dtype
    backward: bool = True
    compiled: bool = False  # under torch.compile, in one graph


Columns = dict[str, dict[str, Probe]]  # column of the table -> value -> probe


def first_word(status: str) -> str:
    """Return the first word of a status: ok, unavailable, wrong, failed or undecided."""
    return status.partition(":")[0]


def first_probe(op: str, impl: str, device: torch.device) -> Columns:
    """Return one probe: the first of the op's cases, in bf16 on a GPU and in fp32 on a CPU."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    case, shape = next(iter(contract(op).CASES.items()))
    return {dtype: {case: Probe(op, impl, shape, PROBE_DTYPES[dtype])}}


def case_probes(op: str, impl: str, dtype: torch.dtype) -> dict[str, Probe]:
    """Return a probe for each of the op's cases, and one of the first case under torch.compile."""
    cases = contract(op).CASES
    probes = {case: Probe(op, impl, shape, dtype) for case, shape in cases.items()}
    first = next(iter(cases))
    return probes | {f"{first} compiled": probes[first]._replace(compiled=True)}


def matrix_probes(op: str, impl: str, device: torch.device) -> Columns:
    """Return the probes of the matrix: every size in every dtype, and the rest in the dtype of first_probe()."""
    module = contract(op)
    [(dtype_name, probes)] = first_probe(op, impl, device).items()
    [probe] = probes.values()
    columns = {
        column: {size: Probe(op, impl, shape, dtype) for size, shape in module.SIZES.items()}
        for column, dtype in PROBE_DTYPES.items()
    }
    if lengths := getattr(module, "LENGTHS", None):
        columns["T"] = {length: probe._replace(shape=shape) for length, shape in lengths.items()}
    for feature in module.FEATURES:
        columns[feature] = {dtype_name: probe._replace(shape=module.CASES[feature])}
    ways = {"forward": {"backward": False}, "backward": {}, "compile": {"compiled": True}}
    if getattr(module, "OPTIMIZER", False):  # without gradients
        del ways["backward"]
    if not getattr(module, "TRAINS", True):
        return columns
    return columns | {way: {dtype_name: probe._replace(**changes)} for way, changes in ways.items()}


def probe_status(probe: Probe, device: torch.device) -> str:
    """Run the backend, and return the status of the probe."""
    op, impl, module = probe.op, probe.impl, contract(probe.op)
    if reason := unavailable(op, impl, device) or interpreter_lacks(probe):
        return f"unavailable: {reason}"
    shape = {**probe.shape, "dtype": probe.dtype, "device": device}
    if not getattr(module, "TRAINS", True):
        return decoder_status(probe, shape)
    inputs = module.inputs(**shape)
    if not probe.backward:
        inputs = {name: value.detach() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    try:
        function = load(op, impl, device, needs=optional_arguments(op, inputs))
        if probe.compiled:
            outputs_and_gradients(out_of_place(module, function), inputs)  # torch.compile would hide Unavailable
            function = torch.compile(function, fullgraph=True, options=inductor_options())
        wrong = why_wrong(op, impl, function, inputs, probe.dtype, strict=not probe.compiled)
    except Unavailable as reason:
        return f"unavailable: {reason}"
    if wrong:
        return f"wrong: {wrong}"
    return f"ok: {describe(op, impl, **shape).removeprefix(f'{impl} (').removesuffix(')')}"


def interpreter_lacks(probe: Probe) -> str | None:
    """Return why Triton's interpreter cannot run this probe of a user's file, or None. load() refuses bf16."""
    is_interpreted = probe.compiled and os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreted and is_silent_triton(backend(probe.op, probe.impl)):
        return "torch.compile cannot trace Triton's interpreter"
    return None


@torch.no_grad()
def decoder_status(probe: Probe, shape: dict) -> str:
    """Run a backend of decode, and return the status of the probe.

    The status of a backend that rounds the weights has its error. Above 10% the backend is wrong.
    """
    op, impl, module = probe.op, probe.impl, contract(probe.op)
    decoder = backend(op, impl)
    try:
        logits = module.run(decoder, **module.inputs(**shape))
    except Unavailable as reason:
        return f"unavailable: {reason}"
    arguments = module.inputs(**shape)
    truth = module.reference(**module.to_float64(arguments))
    version = describe(op, impl).removeprefix(f"{impl} (").removesuffix(")")
    if getattr(decoder, "LOSSY", False):
        error = ((logits.double() - truth).norm() / truth.norm()).item()
        return f"ok: {version}, logits are off by {100 * error:.1f}%" if error < 0.1 else f"wrong: error {error:.2g}"
    results = [{"out0": tensor} for tensor in (logits, module.reference(**arguments), truth)]
    reason = broken_rule(*results, {"wte": arguments["weights"].wte}, probe.dtype)
    return f"wrong: {reason}" if reason else f"ok: {version}"


def send_statuses(pipe: Connection, probes: list[Probe], device: torch.device, log: str, folder: str) -> None:
    """Send a status for each probe, until one fails. Runs in a process of its own, in `folder`.

    A failure ends the process, because after an illegal memory access every CUDA call fails. The file `log` gets what
    Python and C++ print.
    """
    print_to(log)
    os.chdir(folder)  # the path of a backend may be relative
    torch.set_num_threads(1)
    compat.compile_without_workers()
    select_device(str(device))
    for probe in probes:
        try:
            status = probe_status(probe, device)
        except Exception as error:
            pipe.send(failed_status(error))
            raise
        pipe.send(status)


def print_to(log: str) -> None:
    """Let the file `log` get what Python and C++ print in this process."""
    with open(log, "w", encoding="utf-8", errors="replace") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def failed_status(error: Exception) -> str:
    """Return the status of a probe that raised an error: "failed: how", or "undecided: how" if the memory is full."""
    word = "undecided" if is_out_of_memory(error) else "failed"
    return f"{word}: {textwrap.shorten(f'{type(error).__name__}: {error}', 300)}"


class Worker:
    """A context with the process of `send`, such as send_statuses(), which is killed at the end.

    The process forks from a server that has imported torch, so it starts in 0.1 s instead of seconds. The server never
    touches the GPU. It starts with the first worker, and imports the modules of `preload`.
    """

    def __init__(
        self, probes: list, device: torch.device, send: Callable = send_statuses, preload: Sequence[str] = PRELOAD
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self.count, self.log = len(probes), tempfile.NamedTemporaryFile()  # noqa: SIM115, closed in __exit__
        self.pipe, child_end = context.Pipe(duplex=False)
        self.process = context.Process(target=send, args=(child_end, probes, device, self.log.name, os.getcwd()))
        self.process.start()
        child_end.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()
        self.log.close()

    def statuses(self, limit: float) -> list[str]:
        """Return the statuses of the probes, up to the first failure. Waits at most `limit` seconds for each."""
        statuses = []
        while len(statuses) < self.count and (not statuses or first_word(statuses[-1]) not in ENDED):
            if not self.pipe.poll(limit):
                return [*statuses, f"undecided: no answer within {limit:g} s"]
            try:
                statuses.append(self.pipe.recv())
            except EOFError:
                statuses.append(self.describe_end())
        self.process.join(5)  # a killed process leaves locks behind, about which Python complains
        return statuses

    def describe_end(self) -> str:
        """Return the status of a process that ended without an answer, with the last line that it printed."""
        self.process.join(5)
        code = self.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = list(filter(str.strip, read_bytes(self.log.name).decode(errors="replace").splitlines()))
        last = f": {textwrap.shorten(lines[-1], 200)}" if lines else ""
        # the system sends SIGKILL when the memory is full
        word = "undecided" if code == -signal.SIGKILL else "failed"
        return f"{word}: the process ended, {how}{last}"


def run_probes(
    groups: list[list], device: torch.device, limit: float, start: Callable = Worker, processes: int = PROCESSES
) -> Iterator[list[str]]:
    """Yield the statuses of each group of probes, in order.

    `processes` groups run at a time, each in a process of start(probes, device). After a failure, the rest of the group
    runs in another process.
    """
    with ExitStack() as stack:
        workers = (stack.enter_context(start(probes, device)) for probes in groups)
        started = deque(islice(workers, processes))
        for probes in groups:
            with started.popleft() as worker:
                statuses = worker.statuses(limit)
            while len(statuses) < len(probes):
                with start(probes[len(statuses) :], device) as worker:
                    statuses += worker.statuses(limit)
            started.extend(islice(workers, 1))
            yield statuses
