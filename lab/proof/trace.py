"""Profile three steps of a finished run into files: a timeline, on a GPU the memory, and XLA's programs."""

import os
from pathlib import Path

from torch.autograd.profiler import record_function
from torch.profiler import profile

from data.loader import Batch
from kernels.registry import Ops, other_runtimes, source_of
from lab.compat import record_memory
from model.capture import StepRunner
from runtime.timing import synchronize

STEPS = 3


def write_trace(step: StepRunner, batches: list[Batch], folder: Path) -> None:
    """Make three more steps on `batches`, write trace.json.gz, and print how to open it.

    The learning rate is 0, so the weights stay. The trace shows the steps as they ran: replays, if a CUDA graph was
    captured. If there are several processes, only rank 0 writes.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler of PyTorch 2.13 prints that it starts
    if step.graph is None:
        step.release()  # a capture cannot be profiled
    synchronize(step.device)
    with profile(record_shapes=True) as profiler:
        make_steps(step, batches)
        synchronize(step.device)
    if step.optimizer.ranks.is_main:
        trace = folder / "trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        print(f"profile  {trace}: the time of {STEPS} steps; open it in https://ui.perfetto.dev")
        write_hlo(step.model.ops, folder / "hlo")


def write_memory_snapshot(step: StepRunner, batches: list[Batch], folder: Path) -> None:
    """On a GPU, make three more steps with a learning rate of 0, write memory.pickle, and print how to open it.

    It frees the CUDA graph of `step`, because a replay allocates nothing.
    """
    if step.device.type != "cuda":
        return
    step.release()
    snapshot, is_main = folder / "memory.pickle", step.optimizer.ranks.is_main
    with record_memory(snapshot if is_main else None):
        make_steps(step, batches)
        synchronize(step.device)
    if is_main:
        print(f"profile  {snapshot}: the memory of {STEPS} steps; open it in https://pytorch.org/memory_viz")


def write_hlo(ops: Ops, folder: Path) -> None:
    """Write what XLA compiled for each op whose backend runs in XLA into folder/OP.txt, and print where."""
    functions = ops._asdict()
    compiled = other_runtimes(functions)
    if not compiled:
        return
    from kernels import xla  # needs Triton, which is for Linux

    for op, text in xla.hlo(compiled).items():
        folder.mkdir(exist_ok=True)
        path = folder / f"{op}.txt"
        path.write_text(text, encoding="utf-8")
        print(f"profile  {path}: the HLO of {source_of(functions[op])} after XLA's fusion")


def make_steps(step: StepRunner, batches: list[Batch]) -> None:
    for number in range(1, STEPS + 1):
        with record_function(f"training step {number}"):
            step(batches, 0.0)
