"""Time a backend's first call in a new process with empty compile caches: the wait before the first step.

The clock runs from the import of the backend, with the packages that it needs, to the end of one forward and backward.
The time excludes PyTorch's import, the CUDA context and a first matmul. The process forks from a server that has
imported PyTorch, but neither Triton nor Inductor. The driver keeps its own cache.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from kernels.registry import KernelError, Unavailable, contract, impls, load, unavailable
from lab.bench.op import DTYPES, backend_of, contestants, optional_arguments, outputs, random_gradients
from lab.bench.probe import ENDED, Worker, failed_status, first_word, print_to, run_probes
from runtime.device import reset_peak_memory, select_device, usable_cores
from runtime.folders import cache_variables
from runtime.timing import synchronize

LIMIT = 300.0  # seconds of one first call
CORES = 4  # of one first call: compilers that share a core would slow each other down
AT_A_TIME = min(8, max(1, usable_cores() // CORES))  # each has a CUDA context and the op's memory
PRELOAD = ["lab.bench.first_call"]


class FirstCall(NamedTuple):
    """The call to time: `name` is a backend or compile, and `shape` has the arguments of the contract's inputs()."""

    op: str
    name: str
    shape: dict
    dtype: str
    caches: str  # an empty folder


def first_calls(
    op: str, names: list[str], shape: dict, dtype: str, device: torch.device
) -> dict[str, tuple[float | None, str]]:
    """Return name -> (seconds, "ok"), or (None, why there are none: "unavailable: why", "failed: how").

    AT_A_TIME calls run together. A call that fails runs again alone, because the others may have taken the memory. If
    the time or the memory is too short for it alone, its status is "undecided: why".
    """
    call = partial(FirstCall, op, shape=shape, dtype=dtype)
    reset_peak_memory(device)  # free the memory that the allocator of this process caches
    statuses = call_together(names, call, device, AT_A_TIME)
    if min(AT_A_TIME, len(names)) > 1:
        failed = [name for name, status in statuses.items() if first_word(status) in ENDED]
        statuses |= call_together(failed, call, device, 1)
    results = {}
    for name, status in statuses.items():
        word, _, seconds = status.partition(": ")
        results[name] = (float(seconds), word) if word == "ok" else (None, status)
    return results


def call_together(names: list[str], call: Callable, device: torch.device, processes: int) -> dict[str, str]:
    """Return name -> the status of call(name, caches=an empty folder): "ok: SECONDS" or another."""
    worker = partial(Worker, send=send_seconds, preload=PRELOAD)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        calls = [[call(name, caches=tempfile.mkdtemp(dir=folder))] for name in names]
        answers = run_probes(calls, device, LIMIT, worker, processes)
        bar = tqdm(answers, total=len(names), disable=None, leave=False)
        return {name: status for name, [status] in zip(names, bar, strict=True)}


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
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(CORES))  # Inductor's default is all cores
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
