"""The processes of one job: `torchrun --standalone --nproc_per_node=N train.py ...` starts N of them, one for each GPU.

NCCL reduces tensors between GPUs. Values on the host, such as a signal or the clock, go over gloo, because gloo does
not synchronise a GPU. A single process is a job of one rank, and nothing is communicated.
"""

import contextlib
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from common.terminal import warn
from runtime.config import UserError, check
from runtime.signals import STOPPED, Stopped
from runtime.watchdog import Watchdog


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

    `batch_ranks` ranks divide the batches of a step among them, and this one is number `batch_rank` of them. With
    parallel=context there is one batch rank, because every rank takes all batches.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, batch_ranks: int | None = None):
        self.rank, self.world_size = rank, world_size
        self.batch_ranks = batch_ranks or world_size
        self.batch_rank = rank % self.batch_ranks
        self.single = world_size == 1
        self.is_main = rank == 0
        self.watchdog = Watchdog(rank, world_size)
        # What must be freed before this process leaves the job: NCCL would wait for a CUDA graph that contains it
        self.at_exit = contextlib.ExitStack()

    def max_over_ranks(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks. The values go over gloo."""
        self.watchdog.collectives += 1
        if self.single:
            return list(values)
        maxima = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return maxima.tolist()

    def gather(self, value: Any) -> list:
        """Return the values of all ranks, in the order of the ranks, on all ranks."""
        self.watchdog.collectives += 1
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

    def concatenate(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, which have one shape, one after another, in the order of the ranks."""
        whole = part.new_empty(self.world_size * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous())
        return whole

    def exchange(self, parts: Tensor) -> Tensor:
        """Send parts[i] to rank i. Return what the ranks have sent to this rank, in the order of the ranks."""
        return Exchange.apply(parts.contiguous())

    def start_average(self, tensor: Tensor) -> dist.Work:
        """Start to replace the tensor by its mean over the ranks. It is the mean after wait() of the returned work."""
        return dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)

    @contextmanager
    def print_on_rank0_only(self) -> Iterator[None]:
        """Send the stdout of the other ranks to /dev/null within this context."""
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            stream = sys.stdout if self.is_main else nowhere
            with contextlib.redirect_stdout(stream):
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
            # A collective failed: another rank ended, or gloo's time-out is over
            if isinstance(error, dist.DistError) or re.search("/gloo/|pair closure", str(error)):
                raise RankFailed(
                    self.watchdog.failure_reason()
                    or "another rank ended without a message (killed?); torchrun's report names it"
                ) from error
            self.watchdog.report(f"rank {self.rank} failed: {error or type(error).__name__}")
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
    check(not device.startswith("cuda:"), f"device={device} under torchrun: each process takes a GPU; use device=cuda")
    if device == "auto" and not torch.cuda.is_available():
        return "cpu"
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    size = os.environ.get("LOCAL_WORLD_SIZE")
    check(count == 0 or rank < count, f"torchrun started {size} processes for {count} GPU(s): lower --nproc_per_node")
    return f"cuda:{rank}"


@contextmanager
def join_ranks(device: torch.device, parallel: str = "ddp", hang_minutes: float | None = None) -> Iterator[Ranks]:
    """Connect the processes of the job, and yield this process's Ranks. `parallel` is the config's.

    If the job has several processes, the process exits at the end of this context. A job that makes no progress for
    `hang_minutes` ends with an error (None: never).
    """
    if world_size() == 1:
        ranks = Ranks()
        ranks.watchdog.start(dist.HashStore(), hang_minutes)
        try:
            yield ranks
        finally:
            ranks.watchdog.stop()
        return
    store, rank, size = next(rendezvous("env://"))
    store = unused_store(store, rank, size, hang_minutes)
    ranks = Ranks(rank, size, count_batch_ranks(parallel, size))
    timeout = timedelta(minutes=hang_minutes + 5) if hang_minutes else None  # the watchdog's line comes first
    # The watchdog starts before gloo connects, because gloo waits for a stopped rank. It has a clone of the store,
    # because gloo's waits lock the store
    ranks.watchdog.start(store.clone(), hang_minutes)
    try:
        with ranks.share_failure(), ranks.print_on_rank0_only(), ranks.at_exit:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            yield ranks
        leave(ranks)
        # Skip the interpreter's shutdown: all files are closed. Once in a few hundred runs on a busy machine, rank 0
        # aborted during it ("terminate called without an active exception"), and torchrun reported a failed job
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except Stopped as stop:
        if stop.code == STOPPED:  # all ranks stop after the same step
            leave(ranks)
        raise
    finally:
        ranks.watchdog.done.set()


def unused_store(store: dist.Store, rank: int, world_size: int, hang_minutes: float | None = None) -> dist.Store:
    """Return a store that the ranks of this start share, and that no earlier start has used.

    After a restart (--max-restarts), torchrun's store still has the addresses of the ended processes, and gloo would
    wait for them (PyTorch's issue 135712). So rank 0 chooses a new name. Each other rank writes a random word, and
    waits for the answer to this word. Rank 0 answers until all have confirmed, because the first words that it reads
    may be of ended processes. Raises UserError after `hang_minutes`, but at least 1 and at most 10.
    """
    name = uuid.uuid4().hex
    minutes = min(10.0, max(1.0, hang_minutes or 10.0))
    if rank:
        store.set(f"hello{rank}", name)
        wait_for_ranks(rank, lambda: [] if store.check([f"answer-{name}"]) else [0], minutes)
        name = store.get(f"answer-{name}").decode()
        store.set(f"{name}-{rank}", "")
        return dist.PrefixStore(name, store)

    def answer() -> list[int]:
        missing = [other for other in range(1, world_size) if not store.check([f"{name}-{other}"])]
        for other in missing:
            if store.check([f"hello{other}"]):
                store.set(f"answer-{store.get(f'hello{other}').decode()}", name)
        return missing

    wait_for_ranks(rank, answer, minutes)
    return dist.PrefixStore(name, store)


def wait_for_ranks(rank: int, missing: Callable[[], list[int]], minutes: float) -> None:
    """Call missing() until it returns no ranks. Raises UserError after `minutes`, or if the job's store is gone.

    A store.wait() would not notice SIGTERM, which torchrun sends if a rank was killed, 30 s before it kills this one.
    """
    end, names = time.monotonic() + 60 * minutes, "another"
    try:
        while ranks := missing():
            names = ", ".join(map(str, ranks))
            check(
                time.monotonic() < end,
                f"rank {rank}: rank {names} did not join the job within {minutes:g} minutes: it is stopped, or its "
                "machine is down; runtime.hang_minutes, up to 10, gives it more time",
            )
            time.sleep(0.05)
    except Stopped as stop:
        warn(f"rank {rank} got {stop} before rank {names} had joined the job (killed?); torchrun's report names it")
        raise
    except dist.DistError as error:
        raise UserError(f"rank {rank}: torchrun, which holds the job's store, has ended") from error


def leave(ranks: Ranks) -> None:
    """Wait for all ranks, because torchrun ends the others as soon as one has exited; then leave the process group.

    If the other ranks have already left, a collective raises an error here, which is no failure of the job.
    """
    with contextlib.suppress(dist.DistError, RuntimeError):
        ranks.gather(None)
    ranks.watchdog.stop()
    with contextlib.suppress(dist.DistError, RuntimeError):
        dist.destroy_process_group()
