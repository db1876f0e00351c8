"""Save the checkpoints of a run while it trains. runtime/checkpoint.py describes their files."""

import contextlib
import os
import shutil
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from common.terminal import class_and_message, warn
from runtime.checkpoint import State, checkpoint_folders, flatten, save_tensors
from runtime.checkpoint_folder import CheckpointFolder, remove, set_aside
from runtime.config import UserError
from runtime.manifest import SHARDS, TRAINING, WEIGHTS, fsync, write_manifest
from runtime.ranks import Ranks, is_sharded

GATHERED_BYTES = 2**30  # how much of sharded tensors rank 0 gathers on its GPU before it waits for the copies


class Checkpoints:
    """The checkpoints of one run. Every rank has this object; rank 0 writes the files, in a CheckpointFolder."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        sharded: bool,
        ranks: Ranks,
        device: torch.device,
        steps_before: int = 0,
        replicate_to: str | None = None,
    ):
        """The run resumes after step `steps_before`. Raises the errors of CheckpointFolder.begin()."""
        self.folder, self.ranks = folder, ranks
        self.checkpoint_folder = CheckpointFolder(folder, keep, replicate_to)
        self.sharded = sharded and not ranks.single
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future | None = None
        self.pauses: list[float] = []
        self.host_copies: dict[str, Tensor] = {}  # reused for each save; pinned for a GPU, and pinning is slow
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # With the group of the training loop, the collectives of the two threads would mix
        self.group = dist.new_group(backend="gloo") if self.sharded else None
        # The lowest validation loss of all saves, on every rank, also if rank 0 could not write a checkpoint
        self.best = ranks.run_on_rank0(lambda: self.checkpoint_folder.begin(steps_before))
        if ranks.is_main and (folders := checkpoint_folders(folder)):
            self.thread.submit(self.checkpoint_folder.replicate, folders[0])  # a killed save has not made the copy

    def allocate_host_copies(self, shapes: dict[str, torch.Size]) -> None:
        """Let the thread allocate the host memory of a save during the first steps. `shapes` is "group.name" -> shape.

        On an H200's host, pinning the 1.5 GB of 124M takes 1.3 s, which would otherwise be a pause in the first save.
        """
        if self.ranks.is_main and not self.sharded:
            self.pending = self.thread.submit(self._allocate, shapes)

    def _allocate(self, shapes: dict[str, torch.Size]) -> None:
        with contextlib.suppress(RuntimeError, MemoryError):  # the save itself will raise it again
            for key, shape in shapes.items():
                self.host_copies[key] = torch.empty(shape, dtype=torch.float32, pin_memory=self.stream is not None)

    def save(self, step: int, state: State, rest: dict, facts: dict) -> tuple[float, torch.cuda.Event | None]:
        """Start to save: copy `state` to the host, and let the thread write it.

        `rest` goes into training.pt, and `facts` (with val_loss) into the manifest. Returns (seconds that this call
        took, an event before which no tensor of `state` may change). The event is None if the copy is complete.
        """
        start = time.perf_counter()
        self.finish()
        temporary = self.folder / f".step-{step:06d}"
        written: Future | None = None  # done when all shards are written
        copied: torch.cuda.Event | None = None  # done when the copies are complete
        if self.sharded:
            if problem := self.ranks.run_on_rank0(lambda: try_make_folder(temporary)):
                warn(f"{temporary} cannot be created: {problem}")
                return time.perf_counter() - start, None
            from torch.distributed.checkpoint import async_save

            written = async_save(flatten(state), checkpoint_id=temporary / SHARDS, process_group=self.group)
            state = {}
        else:
            state, copied = self._copy_to_host(state)
        self.pauses.append(time.perf_counter() - start)
        pauses = {"last_ms": 1e3 * self.pauses[-1], "median_ms": 1e3 * statistics.median(self.pauses)}
        facts = {"step": step, "pauses": pauses, **facts}
        if facts["val_loss"] is not None:
            self.best = min(self.best, facts["val_loss"])
        if self.ranks.is_main:
            self.pending = self.thread.submit(self._write, temporary, state, rest, facts, written or copied)
        else:
            self.pending = written
        return self.pauses[-1], copied

    def finish(self) -> None:
        """Wait until the last save is on the disk. If it failed, print a warning; earlier checkpoints are unchanged."""
        try:
            self._wait()
        except UserError as error:
            warn(error)

    def close(self) -> dict[str, float]:
        """Wait for the last save, and return the figures for the row. Raises UserError if the last save failed."""
        self._wait()
        return {"checkpoint/pause_ms": 1e3 * statistics.median(self.pauses)} if self.pauses else {}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.finish()
        self.thread.shutdown()

    def _wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending and (error := pending.exception()) and self.ranks.is_main:  # rank 0 raises it for all ranks
            raise error

    def _copy_to_host(self, state: State) -> tuple[State, torch.cuda.Event | None]:
        """Copy the state to the host on rank 0, on a GPU in another stream. Returns (the copies, their last event)."""
        copies: State = {group: {} for group in state}
        gathered_bytes = 0
        for group, tensors in state.items():
            for name, tensor in tensors.items():
                whole = tensor.full_tensor() if is_sharded(tensor) else tensor
                if not self.ranks.is_main:
                    continue
                if (key := f"{group}.{name}") not in self.host_copies:
                    self.host_copies[key] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
                copies[group][name] = self.host_copies[key]
                gathered_bytes += whole.nbytes if is_sharded(tensor) else 0
                if self.stream and gathered_bytes > GATHERED_BYTES:
                    self.stream.synchronize()
                    gathered_bytes = 0
                if self.stream:
                    self.stream.wait_stream(torch.cuda.current_stream())
                    whole.record_stream(self.stream)
                with torch.cuda.stream(self.stream):  # does nothing if the stream is None
                    copies[group][name].copy_(whole, non_blocking=True)
        return copies, self.stream.record_event() if self.stream else None

    def _write(
        self, temporary: Path, state: State, rest: dict, facts: dict, ready: Future | torch.cuda.Event | None
    ) -> None:
        """Wait for `ready`, write a checkpoint to `temporary`, and rename it. Raises UserError if that fails."""
        final = temporary.with_name(temporary.name[1:])
        try:
            if isinstance(ready, Future):
                wait_for_shards(ready)
            elif ready:
                ready.synchronize()
            if not self.sharded:
                make_empty(temporary)
            if state:
                save_tensors(state.pop("model"), temporary / WEIGHTS)
            with (temporary / TRAINING).open("wb") as file:  # with a path, PyTorch's error would not say why
                torch.save({**state, **rest}, file)
            if (metrics := self.folder.parent / "metrics.jsonl").exists():  # a resumed run continues it
                fsync(metrics)
            write_manifest(temporary, facts)
            if os.path.lexists(final):
                set_aside(final)  # a file or a link: the damaged checkpoints of later steps have other names already
            temporary.rename(final)
            fsync(self.folder)
        except (OSError, RuntimeError, SafetensorError, MemoryError) as error:
            # a full disk can raise any of the first three
            shutil.rmtree(temporary, ignore_errors=True)
            cause = error.__context__ if isinstance(error.__context__, OSError) else error  # torch.save hides it
            reason = getattr(cause, "strerror", None) or str(cause).partition("\n")[0] or class_and_message(cause)
            raise UserError(f"{final} could not be written: {reason}; earlier checkpoints stay") from error
        self.checkpoint_folder.complete(final, facts["val_loss"])


def wait_for_shards(written: Future) -> None:
    """Wait until all ranks have written their shards. Raises OSError with the reason of the first rank that failed."""
    from runtime.sharded import CheckpointException, reason_of

    try:
        written.result()
    except CheckpointException as error:
        raise OSError(reason_of(error)) from error


def make_empty(path: Path) -> None:
    """Make an empty folder. Delete what is there, which a killed save has left. Raises OSError."""
    if os.path.lexists(path):
        remove(path)
    path.mkdir(parents=True)


def try_make_folder(path: Path) -> str | None:
    """Do what make_empty() does. Return the reason if that fails, or None."""
    try:
        make_empty(path)
    except OSError as error:
        return error.strerror
    return None
