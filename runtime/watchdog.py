"""End a job that hangs, with a line that names the missing ranks and the collective in which the others wait.

Each rank has a thread that counts a beat in the job's store once a second, and writes there where the main thread is. A
rank whose beats stay the same is stopped, or its machine is down. A rank that beats, but has begun fewer collectives
than the others, is late: its data, its disk or its GPU hangs. Time is counted in beats, so a job that is suspended as a
whole and continued goes on. The time-outs of gloo and NCCL cannot say which rank is missing.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from common.terminal import class_and_message, printable, warn
from runtime.torch_compat import flight_records, name_groups, pending_collective

GRACE = 10.0  # seconds in which the other ranks must end by themselves after a rank has failed
ROOT = Path(__file__).parents[1]
RANKS = ROOT / "runtime" / "ranks.py"  # the calls of collectives
WAITS = {"data/loader.py": "data", "runtime/saver.py": "the disk", "runtime/timing.py": "the GPU"}  # file -> for what


class Watchdog:
    """The thread of one rank. Within its context, the training loop is expected to begin collectives.

    If the job hangs, or another rank has failed and this one does not end by itself, the thread writes PyTorch's record
    of the last collectives to `folder`, calls `on_stuck` with the reason, and ends the process.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self.on_stuck: Callable[[str], None] = print
        self.folder: Path | None = None  # of the run
        self.collectives = 0  # of the host, which the main thread has begun
        self.looping = False
        self.beats = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def start(self, store: dist.Store, hang_minutes: float | None) -> None:
        """Start the thread. The store is torchrun's, so it outlives a rank; one process has a store of its own."""
        self.store, self.hang_minutes = dist.PrefixStore("hotswap", store), hang_minutes
        self._beat()
        self.thread.start()

    def stop(self) -> None:
        self.done.set()
        self.thread.join(2.0)  # it must not query the store after destroy_process_group()

    def __enter__(self) -> "Watchdog":
        self.looping = True
        return self

    def __exit__(self, *_) -> None:
        self.looping = False

    def report(self, reason: str) -> str:
        """Write the reason of a failure for the other ranks. Returns the reason of the first rank that wrote one."""
        return self.store.compare_set("failed", "", reason).decode()

    def failure_reason(self, seconds: float = 3.0) -> str | None:
        """Return the reason that the first failed rank has written; None if it has written none after `seconds`."""
        end = time.monotonic() + seconds
        while not self.store.check(["failed"]):
            if time.monotonic() > end:
                return None
            time.sleep(0.1)
        return self.store.get("failed").decode()

    def _watch(self) -> None:
        neighbour = main_thread = None  # (its count, the beat in which it changed)
        while not self.done.wait(1.0):
            try:
                self._beat()
                neighbour = note_change(neighbour, self._count((self.rank + 1) % self.world_size), self.beats)
                main_thread = note_change(main_thread, self.collectives if self.looping else self.beats, self.beats)
                idle_beats = self.beats - min(neighbour[1], main_thread[1])
                reason = self.failure_reason(seconds=0)
                if not reason and self.hang_minutes and idle_beats >= 60 * self.hang_minutes:
                    reason = self._announce(self._explain_hang())
            except dist.DistError:
                reason = "torchrun, which holds the job's store, has ended"
            except Exception as error:  # without this thread's beats the job would end all the same, and blame the rank
                reason = self._announce(f"the watchdog of rank {self.rank} failed: {class_and_message(error)}")
            # Rank 0 is the first to end, because it writes the row, and torchrun then ends all others
            if reason and not self.done.wait(GRACE if self.rank == 0 else GRACE + 2):
                self._end(reason)

    def _announce(self, found: str) -> str:
        """Print what this rank has found, unless another rank was first. Returns the reason of the first."""
        reason = found
        with contextlib.suppress(Exception):  # the store may be gone, and this process must end all the same
            reason = self.report(found)
        if reason == found:
            print(f"error: {printable(reason)}", file=sys.stderr, flush=True)
        return reason

    def _end(self, reason: str) -> None:
        """Write the records of collectives, call `on_stuck`, and end the process, even if one of them fails."""
        try:
            if self.folder and self.world_size > 1:
                write_records(self.folder / "collectives", self.rank, self.world_size)
        except Exception as error:  # another version of PyTorch may have other records
            warn(f"the last collectives cannot be recorded: {class_and_message(error)}")
        try:
            self.on_stuck(reason)
        except Exception as error:
            warn(f"the run cannot be closed: {class_and_message(error)}")
        finally:
            os._exit(1)

    def _beat(self, collective: str | None = None) -> None:
        self.beats = self.store.add(f"beats{self.rank}", 1)
        state = self.collectives, socket.gethostname(), main_thread_place(collective)
        self.store.set(f"state{self.rank}", json.dumps(state))

    def _count(self, rank: int) -> int:
        """Return the beats of a rank. It never waits, because adding 0 makes a missing key 0."""
        return self.store.add(f"beats{rank}", 0)

    def _state(self, rank: int) -> list:
        """Return what _beat() wrote last for a rank. It never waits, not even for a first beat."""
        key = f"state{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else [0, "an unknown machine", "has no beat"]

    def _explain_hang(self) -> str:
        """Name the ranks that are stopped or late, and say where the others are. It takes 3 s, to see who beats."""
        ranks = range(self.world_size)
        before = [self._count(rank) for rank in ranks]
        for _ in range(3):
            time.sleep(1.0)
            self._beat(pending_collective())  # here only, because it reads 2,000 records
        states = [self._state(rank) for rank in ranks]
        stopped = [self._count(rank) == before[rank] for rank in ranks]
        counts = [collectives for rank, (collectives, _, _) in enumerate(states) if not stopped[rank]]
        found: dict[str, list[int]] = {}  # what ranks do, with the missing ranks first -> these ranks
        for rank in sorted(ranks, key=lambda rank: (not stopped[rank], states[rank][0])):
            collectives, host, place = states[rank]
            late = "is late, and " if collectives < max(counts) else ""
            does = "is stopped, or its machine is down" if stopped[rank] else late + place
            found.setdefault(f"on {host} {does}", []).append(rank)
        where = "; ".join(f"rank {', '.join(map(str, names))} {does}" for does, names in found.items())
        return (
            f"the job made no progress for {self.hang_minutes:g} minutes: {where}; resume it with train.resume=auto, "
            "or raise runtime.hang_minutes if a step may take so long"
        )


def note_change(last: tuple[int, int] | None, count: int, beat: int) -> tuple[int, int]:
    """Return (count, the beat in which it became this count)."""
    return last if last and last[0] == count else (count, beat)


def main_thread_place(collective: str | None) -> str:
    """Say where the main thread is: in which line of this repo, and for what it waits there."""
    frame = sys._current_frames()[threading.main_thread().ident]
    communicates = False
    while frame.f_back and not is_ours(frame.f_code.co_filename):
        communicates |= frame.f_code.co_filename == str(RANKS)
        frame = frame.f_back
    path = os.path.relpath(frame.f_code.co_filename, ROOT)
    known = None if communicates else WAITS.get(path)
    wait = known or collective
    return f"{f'waits for {wait}' if wait else 'is'} at {path}:{frame.f_lineno} ({frame.f_code.co_name})"


def is_ours(path: str) -> bool:
    """Return whether this file is in this repo, outside of a virtual environment and of the calls of collectives."""
    return path.startswith(f"{ROOT}/") and "site-packages" not in path and path != str(RANKS)


def write_records(folder: Path, rank: int, world_size: int) -> None:
    """Write PyTorch's records of this rank's last collectives, for torchfrtrace."""
    folder.mkdir(parents=True, exist_ok=True)
    for backend, record in flight_records().items():
        (folder / f"{backend}-rank{rank}").write_bytes(name_groups(record, world_size))
