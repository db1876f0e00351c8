"""The processes of one job: `torchrun --standalone --nproc_per_node=N train.py ...` starts N of them, one for each GPU.

NCCL reduces tensors between GPUs. Values on the host, such as a signal or the clock, go over gloo, because gloo does
not synchronise a GPU. A single process is a job of one rank, and nothing is communicated.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.config import UserError, check
from runtime.signals import STOPPED, Stopped

GRACE = 10.0  # seconds in which the other ranks must end by themselves after a rank has failed


class RankFailed(UserError):
    """Another rank of the job failed. The message says which one, and why."""


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor, as FSDP makes them. It does not import DTensor, which takes 1 s."""
    return hasattr(tensor, "full_tensor")


class Exchange(torch.autograd.Function):
    """dist.all_to_all_single with a gradient. The same exchange takes the gradient back."""

    @staticmethod
    def forward(ctx, parts):
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient.contiguous())


class Ranks:
    """This process's rank in the job, and the communication between the ranks.

    `batch_ranks` ranks divide the batches among them, and this process takes the share of number `batch_rank`.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, batch_ranks: int | None = None):
        self.rank, self.world_size = rank, world_size
        self.batch_ranks = batch_ranks or world_size
        self.batch_rank = rank % self.batch_ranks
        self.single = world_size == 1
        self.is_main = rank == 0
        # If another rank has failed, watch_for_failure() calls this with the reason before it ends this process
        self.on_stuck: Callable[[str], None] = print
        # What must be freed before this process leaves the job: NCCL would wait for a CUDA graph that contains it
        self.at_exit = contextlib.ExitStack()

    def max_over_ranks(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks. The values go over gloo."""
        if self.single:
            return list(values)
        maxima = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return maxima.tolist()

    def gather(self, value: Any) -> list:
        """Return the values of all ranks, in the order of the ranks, on all ranks."""
        if self.single:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        return self.gather(value)[0]

    def run_on_rank0(self, work: Callable[[], Any]) -> Any:
        """Call work() on rank 0 only, and return its result on all ranks."""
        return self.broadcast(work() if self.is_main else None)

    def run_on_rank0_first(self, work: Callable[[], Any]) -> Any:
        """Call work() on rank 0, and then on the other ranks, which can use the files that rank 0 has written."""
        result = work() if self.is_main else None
        self.gather(None)
        return result if self.is_main else work()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks, on the device, without a synchronisation."""
        return value if self.single else self.sum(value) / self.world_size

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks, on the device, without a synchronisation."""
        if self.single:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value

    def exchange(self, parts: Tensor) -> Tensor:
        """Send parts[i] to rank i. Return what the ranks have sent to this rank, in the order of the ranks."""
        return Exchange.apply(parts.contiguous())

    def start_average(self, tensor: Tensor) -> dist.Work:
        """Start to replace the tensor by its mean over the ranks. It is the mean after wait() of the returned work."""
        return dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)

    @contextmanager
    def print_on_rank0_only(self) -> Iterator[None]:
        """Send the stdout of the other ranks to /dev/null within this context."""
        with contextlib.ExitStack() as stack:
            if not self.is_main:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            yield

    @contextmanager
    def share_failure(self) -> Iterator[None]:
        """Let the other ranks raise RankFailed with the reason if this rank fails within this context."""
        try:
            yield
        except RankFailed:
            raise
        except Exception as error:
            if self.single:
                raise
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when a rank ends; first share the reason
            if isinstance(error, dist.DistError) or "/gloo/" in str(error):  # a collective failed: another rank ended
                raise RankFailed(
                    failure_reason() or "another rank ended without a message (killed?); torchrun's report names it"
                ) from error
            shared_store().compare_set("failed", "", f"rank {self.rank} failed: {error or type(error).__name__}")
            raise


def started_by_torchrun() -> bool:
    """Whether torchrun (or anything that sets its variables) started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() and os.environ["WORLD_SIZE"].isdigit()


def world_size() -> int:
    """Return the number of processes of the job. It reads the environment, so the process group need not exist yet."""
    return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1


def count_batch_ranks(parallel: str, processes: int) -> int:
    """Return how many of the processes divide the batches: with parallel=context, all take the same batches."""
    return 1 if parallel == "context" else processes


def rank_device(device: str) -> str:
    """Return the device of this process. Under torchrun, a process takes the GPU of its local rank.

    Raises UserError if `device` names one GPU for all processes, or if there are more processes than GPUs.
    """
    if not started_by_torchrun() or device == "cpu":
        return device
    check(
        not device.startswith("cuda:"),
        f"device={device} under torchrun: each process takes a GPU of its own; use device=cuda",
    )
    if device == "auto" and not torch.cuda.is_available():
        return "cpu"
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    check(
        count == 0 or rank < count,
        f"torchrun started {os.environ.get('LOCAL_WORLD_SIZE')} processes, and this machine has {count} GPU(s): lower "
        "--nproc_per_node",
    )
    return f"cuda:{rank}"


@contextmanager
def join_ranks(device: torch.device, parallel: str = "ddp") -> Iterator[Ranks]:
    """Connect the processes of the job, and yield this process's Ranks. `parallel` is the config's.

    If the job has several processes, the process exits at the end of this context.
    """
    if world_size() == 1:
        yield Ranks()
        return
    cuda = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), count_batch_ranks(parallel, dist.get_world_size()))
    done = threading.Event()
    watcher = threading.Thread(target=watch_for_failure, args=(ranks, done), daemon=True)
    watcher.start()
    try:
        with ranks.share_failure(), ranks.print_on_rank0_only(), ranks.at_exit:
            yield ranks
        leave(ranks, done, watcher)
        # Skip the interpreter's shutdown: all files are closed. Once in a few hundred runs on a busy machine, rank 0
        # aborted during it ("terminate called without an active exception"), and torchrun reported a failed job
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except Stopped as stop:
        if stop.code == STOPPED:  # all ranks stop after the same step
            leave(ranks, done, watcher)
        raise
    finally:
        done.set()


def leave(ranks: Ranks, done: threading.Event, watcher: threading.Thread) -> None:
    """Wait for all ranks, and leave the process group.

    Rank 0 may still be busy, and torchrun would end it as soon as another rank has exited. If the other ranks have
    already left, a collective raises an error here, which is no failure of the job.
    """
    with contextlib.suppress(dist.DistError, RuntimeError):
        ranks.gather(None)
    done.set()
    watcher.join(2.0)  # it must not query the store after destroy_process_group()
    with contextlib.suppress(dist.DistError, RuntimeError):
        dist.destroy_process_group()


def shared_store() -> dist.Store:
    """Return the key-value store of the job, in which a rank that fails writes its reason.

    The store is in torchrun's process, so it outlives a rank.
    """
    return dist.PrefixStore("hotswap", dist.group.WORLD.get_group_store())


def failure_reason(seconds: float = 3.0) -> str | None:
    """Return the reason that the first failed rank has written; None if it has written none after `seconds`."""
    end = time.monotonic() + seconds
    while not shared_store().check(["failed"]):
        if time.monotonic() > end:
            return None
        time.sleep(0.1)
    return shared_store().get("failed").decode()


def watch_for_failure(ranks: Ranks, done: threading.Event) -> None:
    """End this process if another rank has failed, because it may wait for that rank inside NCCL forever."""
    while not done.wait(1.0):
        reason = None
        try:
            if shared_store().check(["failed"]):
                reason = failure_reason()
        except (dist.DistError, RuntimeError, AttributeError):  # torchrun has ended, or the process group is destroyed
            reason = "torchrun, which started this process, has ended"
        if reason and not done.wait(GRACE):
            ranks.on_stuck(reason)
            os._exit(1)
