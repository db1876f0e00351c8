"""The processes of one job: `torchrun --standalone --nproc_per_node=N train.py ...` starts N, one a GPU.

Tensors are reduced by NCCL between GPUs; what the hosts must agree on (a signal, the clock) goes over gloo, so that
asking costs no synchronisation of a GPU. One process alone is a job of one rank, for which all of this does nothing.
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

BUCKET = 2**26  # elements that are reduced at a time: average() takes so much besides, 256 MiB in fp32
GRACE = 10.0  # seconds that a rank has to end by itself after another one failed


class RankFailed(UserError):
    """Another rank of the job failed; the message says which, and why."""


class Ranks:
    """This process's place in the job, and what the processes say to each other."""

    def __init__(self, rank: int = 0, world_size: int = 1):
        self.rank, self.world_size = rank, world_size
        self.alone, self.leads = world_size == 1, rank == 0
        self.rescue: Callable[[str], None] = print  # what to do with the reason before a stuck rank is ended

    def agree(self, *values: float) -> list[float]:
        """The largest of each value over all ranks, on the hosts."""
        if self.alone:
            return list(values)
        told = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return told.tolist()

    def gather(self, value: Any) -> list:
        """Every rank's value, in the order of the ranks, on all of them."""
        if self.alone:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def tell(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return self.gather(value)[0]

    def first(self, work: Callable[[], Any]) -> Any:
        """work() on rank 0 and only then on the others, which find what it left."""
        result = work() if self.leads else None
        self.gather(None)
        return result if self.leads else work()

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks, on the device and not waited for."""
        return value if self.alone else self.total(value) / self.world_size

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks, on the device and not waited for."""
        if self.alone:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value

    def average(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its mean over the ranks. In buckets: 124M has 148 tensors, each with its latency."""
        if self.alone:
            return
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket]) if len(bucket) > 1 else bucket[0].flatten()
            dist.all_reduce(flat)
            flat /= self.world_size
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Whoever fails in here tells the others why, and there it is a RankFailed with that reason."""
        try:
            yield
        except RankFailed:
            raise
        except Exception as error:
            if self.alone:
                raise
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it now: time for the last words
            if isinstance(error, dist.DistError) or "/gloo/" in str(error):  # a collective lost its partner
                raise RankFailed(
                    reason() or "another rank died without a word (killed?): torchrun's report names it"
                ) from error
            notes().compare_set("failed", "", f"rank {self.rank} failed: {error or type(error).__name__}")
            raise


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, in lists of at most BUCKET elements or of one tensor."""
    held: list[Tensor] = []
    for tensor in tensors:
        if held and sum(t.numel() for t in held) + tensor.numel() > BUCKET:
            yield held
            held = []
        held.append(tensor)
    if held:
        yield held


def launched() -> bool:
    """Whether torchrun (or anything that sets its variables) started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() and os.environ["WORLD_SIZE"].isdigit()


def world_size() -> int:
    """How many processes the job has, as the environment says before they have met."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def placed(device: str) -> str:
    """The config's device for this process: under torchrun each takes the GPU of its local rank."""
    if not launched() or device == "cpu":
        return device
    check(
        not device.startswith("cuda:"), f"device={device} under torchrun: each process takes its own; say device=cuda"
    )
    if device == "auto" and not torch.cuda.is_available():
        return "cpu"
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    check(
        count == 0 or rank < count,
        f"torchrun started {os.environ.get('LOCAL_WORLD_SIZE')} processes here, and there are {count} GPU(s): lower "
        "--nproc_per_node",
    )
    return f"cuda:{rank}"


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The job, while it lasts; of several processes, each ends with it."""
    if world_size() == 1:
        yield Ranks()
        return
    cuda = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(ranks, done), daemon=True)
    watcher.start()
    try:
        with ranks.failing_together():
            yield ranks
        part(ranks, done, watcher)
        # All is written and closed. On the interpreter's own way out rank 0 was seen to abort, once in some hundred
        # runs on a busy machine ("terminate called without an active exception"): a failed job, says torchrun
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except Stopped as stop:
        if stop.code == STOPPED:  # all of them, after the same step
            part(ranks, done, watcher)
        raise
    finally:
        done.set()


def part(ranks: Ranks, done: threading.Event, watcher: threading.Thread) -> None:
    """Leave together, the work being done: rank 0 may still be busy, and torchrun ends it when another is gone. Who
    hears of it last may find the others gone, which is no failure any more."""
    with contextlib.suppress(dist.DistError, RuntimeError):
        ranks.gather(None)
    done.set()
    watcher.join(2.0)  # it must not ask a store that goes
    with contextlib.suppress(dist.DistError, RuntimeError):
        dist.destroy_process_group()


def notes() -> dist.Store:
    """Where ranks leave each other word; torchrun keeps it, so it outlives a rank."""
    return dist.PrefixStore("hotswap", dist.distributed_c10d._get_default_store())


def reason(seconds: float = 3.0) -> str | None:
    """What the first rank to fail said that it failed of; it may need some seconds to say so."""
    end = time.monotonic() + seconds
    while not notes().check(["failed"]):
        if time.monotonic() > end:
            return None
        time.sleep(0.1)
    return notes().get("failed").decode()


def watch(ranks: Ranks, done: threading.Event) -> None:
    """End this process when another rank has failed: who waits for it inside NCCL would wait for ever."""
    while not done.wait(1.0):
        try:
            failed = notes().check(["failed"])
        except (dist.DistError, RuntimeError, ValueError):  # the store went with torchrun, or with the process group
            failed = None
        if failed is not False and not done.wait(GRACE):
            ranks.rescue(reason() if failed else "torchrun, which started this process, is gone")
            os._exit(1)
