"""Profile three steps of a finished run into files that a browser opens: a timeline, and on a GPU the memory."""

import os
from pathlib import Path

from torch.autograd.profiler import record_function
from torch.profiler import profile

from data.loader import Batch
from lab.compat import record_memory
from model.capture import StepRunner
from runtime.timing import synchronize

STEPS = 3


def write_profile(step: StepRunner, batches: list[Batch], folder: Path) -> None:
    """Make three more steps on `batches` and write trace.json.gz; on a GPU, make three again and write memory.pickle.

    The learning rate is 0, so the weights stay. The trace shows the steps as they ran: replays, if a CUDA graph was
    captured. A replay allocates nothing, so the graph is freed before the steps of the memory snapshot. Prints how to
    open the files. If there are several processes, only rank 0 writes.
    """
    is_main, cuda = step.optimizer.ranks.is_main, step.device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler of PyTorch 2.13 prints that it starts
    if step.graph is None:
        step.release()  # a capture cannot be profiled
    synchronize(step.device)
    with profile(record_shapes=True) as profiler:
        make_steps(step, batches)
        synchronize(step.device)
    if is_main:
        trace = folder / "trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        print(f"profile  {trace}: the time of {STEPS} steps; open it in https://ui.perfetto.dev")
    if not cuda:
        return
    step.release()
    snapshot = folder / "memory.pickle"
    with record_memory(snapshot if is_main else None):
        make_steps(step, batches)
        synchronize(step.device)
    if is_main:
        print(f"profile  {snapshot}: the memory of {STEPS} steps; open it in https://pytorch.org/memory_viz")


def make_steps(step: StepRunner, batches: list[Batch]) -> None:
    for number in range(1, STEPS + 1):
        with record_function(f"training step {number}"):
            step(batches, 0.0)
