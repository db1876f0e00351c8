"""Time a backend's first call in a new process with empty compile caches: the wait before the first step.

The clock runs from the import of the backend, with the packages that it needs, to the end of one forward and backward.
The time excludes PyTorch's import, the CUDA context and a first matmul. The process forks from a server that has
imported PyTorch, but neither Triton nor Inductor. The driver keeps its own cache.
"""

import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.registry import KernelError, Unavailable, contract, impls, load, unavailable
from lab.bench.op import DTYPES, backend_of, contestants, optional_arguments, outputs, random_gradients
from lab.bench.probe import Worker, failed_status, print_to
from runtime.device import select_device
from runtime.folders import cache_variables
from runtime.timing import synchronize

LIMIT = 300.0  # seconds of one first call
PRELOAD = ["lab.bench.first_call"]


class FirstCall(NamedTuple):
    """The call to time: `name` is a backend or compile, and `shape` has the arguments of the contract's inputs()."""

    op: str
    name: str
    shape: dict
    dtype: str
    caches: str  # an empty folder


def first_call(op: str, name: str, shape: dict, dtype: str, device: torch.device) -> tuple[float | None, str]:
    """Return (seconds, "ok"), or (None, why there are none: "unavailable: why", "failed: how", "undecided: why")."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        call = FirstCall(op, name, shape, dtype, folder)
        with Worker([call], device, send=send_seconds, preload=PRELOAD) as worker:
            [status] = worker.statuses(LIMIT)
    word, _, seconds = status.partition(": ")
    return (float(seconds), word) if word == "ok" else (None, status)


def absent_backends(op: str, device: torch.device) -> dict[str, str]:
    """Return {impl: "unavailable: why" or "failed: why"} of the backends that cannot run here, or be imported."""
    statuses = {}
    for impl in impls(op):
        try:
            if reason := unavailable(op, impl, device):
                statuses[impl] = f"unavailable: {reason}"
        except KernelError as error:
            statuses[impl] = f"failed: {error}"
    return statuses


def send_seconds(pipe: Connection, calls: list[FirstCall], device: torch.device, log: str, folder: str) -> None:
    """Send "ok: SECONDS" or another status of the one call. Runs in a process of its own, in `folder`."""
    print_to(log)
    os.chdir(folder)
    [call] = calls
    os.environ |= cache_variables(Path(call.caches))
    try:
        pipe.send(f"ok: {time_first_call(call, select_device(str(device)))}")
    except Unavailable as reason:
        pipe.send(f"unavailable: {reason}")
    except Exception as error:
        pipe.send(failed_status(error))
        raise


def time_first_call(call: FirstCall, device: torch.device) -> float:
    """Return the seconds of the call. Raises Unavailable if the backend cannot take it."""
    module, dtype = contract(call.op), DTYPES[call.dtype]
    square = torch.ones(128, 128, dtype=dtype, device=device, requires_grad=True)
    torch.autograd.grad(square @ square, square, torch.ones_like(square))  # starts cuBLAS and autograd
    inputs = module.inputs(**call.shape, dtype=dtype, device=device)
    synchronize(device)
    start = time.perf_counter()
    load(call.op, backend_of(call.name), device, optional_arguments(call.op, inputs))
    function = contestants(call.op, [call.name], device)[call.name]
    results = outputs(function, inputs)
    leaves = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    if leaves:
        torch.autograd.grad(results, leaves, random_gradients(results, inputs))
    synchronize(device)
    return time.perf_counter() - start
