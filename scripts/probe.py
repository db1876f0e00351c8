"""What `python -m scripts.doctor` asks of each backend, and the answers, from processes that it may take down."""

import multiprocessing
import os
import signal
import tempfile
import textwrap
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch._inductor.config
from torch import Tensor

from kernels.check import evaluate, wrong
from kernels.registry import Unavailable, contract, describe, load, unavailable
from runtime.device import pick
from scripts.support import word

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = (64, 768, 769, 1600, 4096)
HEAD_DIMS = (64, 80, 96, 128, 256)
LENGTHS = (1, 127, 1024)
ROWS = 5  # fewer than any kernel's block; an MLP of width 4096 in fp16 is a minute for a CPU
FEATURES = {  # names in the op's CASES
    "norm": ["fp32_residual", "no_bias"],
    "attention": ["full", "gqa", "window", "documents", "decode", "lengths"],
    "mlp": ["no_bias"],
    "loss": ["all_ignored"],
}
EXTRAS = {"loss": {"vocab": 1024}}  # of inputs(), besides the shape
PROCESSES = max(4, (os.cpu_count() or 1) // 2)  # at a time; on a GPU each takes some memory for itself
# What each process would import before it begins: this module, and those that its main one, the doctor, is made of
PRELOAD = ["scripts.probe", "scripts.bench_kernels"]


class Probe(NamedTuple):
    """Is this backend right for inputs(**shape) of this dtype?"""

    op: str
    impl: str
    shape: dict
    dtype: torch.dtype
    backward: bool = True
    compiled: bool = False  # under torch.compile, without a break in the graph


def usual(op: str, impl: str, device: torch.device) -> dict[str, dict[str, Probe]]:
    """{column: {value: the one question}}: the first of its op's cases, in bf16 on a GPU, in fp32 on a CPU."""
    name = "bf16" if device.type == "cuda" else "fp32"
    case, shape = next(iter(contract(op).CASES.items()))
    return {name: {case: Probe(op, impl, shape, DTYPES[name])}}


def matrix(op: str, impl: str, device: torch.device) -> dict[str, dict[str, Probe]]:
    """All questions: every width (or head dim) in every dtype, and the rest in the usual one."""
    [(name, asked)] = usual(op, impl, device).items()
    [probe] = asked.values()
    heads = op == "attention"
    columns = {}
    for column, dtype in DTYPES.items():
        shapes = {str(d): (2, 128, 2, d) for d in HEAD_DIMS} if heads else {str(C): (ROWS, C) for C in WIDTHS}
        columns[column] = {
            size: Probe(op, impl, {"shape": shape, **EXTRAS.get(op, {})}, dtype) for size, shape in shapes.items()
        }
    if heads:
        columns["T"] = {str(T): probe._replace(shape={"shape": (1, T, 2, 64)}) for T in LENGTHS}
    for feature in FEATURES[op]:
        columns[feature] = {name: probe._replace(shape=contract(op).CASES[feature])}
    ways = {"forward": {"backward": False}, "backward": {}, "compile": {"compiled": True}}
    return columns | {way: {name: probe._replace(**changes)} for way, changes in ways.items()}


def answer(probe: Probe, device: torch.device) -> str:
    """The probe's status: see scripts/support.py."""
    op, impl, module = probe.op, probe.impl, contract(probe.op)
    if why := unavailable(op, impl, device):
        return f"unavailable: {why}"
    shape = {**probe.shape, "dtype": probe.dtype, "device": device}
    inputs = module.inputs(**shape)
    if not probe.backward:
        inputs = {name: value.detach() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    try:
        function = load(op, impl, device, needs=[name for name in ("lengths", "window", "starts") if name in inputs])
        got = evaluate(function, inputs)
    except Unavailable as why:
        return f"unavailable: {why}"
    if probe.compiled:
        got = evaluate(torch.compile(function, fullgraph=True), inputs)
    truth = evaluate(module.reference, inputs, dtype=torch.float64)
    why = wrong(got, evaluate(load(op, "eager", device), inputs), truth, inputs, probe.dtype)
    if impl == "eager":  # the yardstick itself has to be the formula
        exact = evaluate(function, inputs, dtype=torch.float64)
        why = why or wrong(exact, truth, truth, inputs, torch.float64)
    executed = describe(op, impl, **shape).removeprefix(f"{impl} (").removesuffix(")")
    return f"wrong: {why}" if why else f"ok: {executed}"


def work(pipe: Connection, probes: list[Probe], device: torch.device, noise: str) -> None:
    """In a process of its own: send a status a probe. A failure is the end, for after an illegal memory access CUDA
    fails whatever is asked next. `noise` is the file for all that is printed, be it by C++."""
    with open(noise, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # in this process, for a pool takes seconds to start and may outlive us
    pick(str(device))
    for probe in probes:
        try:
            status = answer(probe, device)
        except Exception as error:
            pipe.send(f"failed: {textwrap.shorten(f'{type(error).__name__}: {error}', 300)}")
            raise
        pipe.send(status)


class Worker:
    """The process of work(); a context manager, at whose end it is killed. A fork server has imported all it needs, so
    that one takes 0.1 s and not the seconds of `import torch`; that server has never seen the GPU."""

    def __init__(self, probes: list[Probe], device: torch.device):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.count, self.noise = len(probes), tempfile.NamedTemporaryFile()  # noqa: SIM115, closed in __exit__
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(theirs, probes, device, self.noise.name))
        self.process.start()
        theirs.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()
        self.noise.close()

    def statuses(self, limit: float) -> list[str]:
        """Those of its probes, or of the first ones: a failure is the last. `limit`: seconds for each."""
        found = []
        while len(found) < self.count and (not found or word(found[-1]) != "failed"):
            if not self.pipe.poll(limit):
                return [*found, f"failed: no answer within {limit:g} s"]
            try:
                found.append(self.pipe.recv())
            except EOFError:
                found.append(f"failed: {self.death()}")
        self.process.join(5)  # by itself, for a kill would leave locks behind, of which Python complains
        return found

    def death(self) -> str:
        """What the process died of, and its last line."""
        self.process.join(5)
        code = self.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        *_, last = ["", *filter(str.strip, Path(self.noise.name).read_text(errors="replace").splitlines())]
        return f"the process ended, {how}{': ' * bool(last)}{textwrap.shorten(last, 200)}"


def examine(groups: list[list[Probe]], device: torch.device, limit: float) -> Iterator[list[str]]:
    """The statuses of each group of probes, in order; a few groups at a time, each in a process, and in another one
    after a failure."""
    with ExitStack() as stack:
        workers = (stack.enter_context(Worker(probes, device)) for probes in groups)
        started = deque(islice(workers, PROCESSES))
        for probes in groups:
            with started.popleft() as worker:
                found = worker.statuses(limit)
            while len(found) < len(probes):
                with Worker(probes[len(found) :], device) as worker:
                    found += worker.statuses(limit)
            started.extend(islice(workers, 1))
            yield found
