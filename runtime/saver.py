"""Save the checkpoints of a run while it trains. runtime/checkpoint.py describes their files."""

import contextlib
import itertools
import math
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

from runtime.checkpoint import State, checkpoint_folders, flatten, is_real_folder, save_tensors, verify
from runtime.config import UserError
from runtime.folders import explain_unwritable
from runtime.manifest import (
    SHARDS,
    TRAINING,
    WEIGHTS,
    Unreadable,
    fsync,
    read_manifest,
    step_number,
    write_manifest,
)
from runtime.ranks import Ranks, is_sharded
from terminal import class_and_message, warn

GROUPS = ("model", "exp_avg", "exp_avg_sq")  # the groups of an optimizer's state()
GATHERED_BYTES = 2**30  # how much of sharded tensors rank 0 gathers on its GPU before it waits for the copies


class Checkpoints:
    """The checkpoints of one run. Every rank has this object; rank 0 writes the files.

    It keeps the newest `keep` checkpoints, and the one with the lowest validation loss. With `replicate_to`,
    the folder replicate_to/RUN has a copy of the newest checkpoint.
    """

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
        """Move the checkpoints of later steps than `steps_before` aside, and finish what a killed save has begun.

        The run resumes after step `steps_before`, so every later checkpoint is damaged. Raises UserError if one cannot
        be moved, and Unreadable if the folder or its best checkpoint cannot be read.
        """
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self.sharded = sharded and not ranks.single
        self.replica = Path(replicate_to) / folder.parent.name if replicate_to else None
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future | None = None
        self.pauses: list[float] = []
        self.host_copies: dict[str, Tensor] = {}  # reused for each save; pinned for a GPU, and pinning is slow
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # With the group of the training loop, the collectives of the two threads would mix
        self.group = dist.new_group(backend="gloo") if self.sharded else None
        self.best = ranks.run_on_rank0(lambda: self._complete_last_save(steps_before))

    def allocate_host_copies(self, shapes: dict[str, torch.Size]) -> None:
        """Let the thread allocate the host memory of a save during the first steps: three fp32 tensors a shape.

        On an H200's host, pinning the 1.5 GB of 124M takes 1.3 s, which would otherwise be a pause in the first save.
        """
        if self.ranks.is_main and not self.sharded:
            group_shapes = {f"{group}.{name}": shapes[name] for group in GROUPS for name in shapes}
            self.pending = self.thread.submit(self._allocate, group_shapes)

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
        is_best = facts["val_loss"] is not None and facts["val_loss"] < self.best
        if is_best:
            self.best = facts["val_loss"]
        if self.ranks.is_main:
            self.pending = self.thread.submit(self._write, temporary, state, rest, facts, written or copied, is_best)
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

    def _complete_last_save(self, steps_before: int) -> float:
        """Do what a kill during the last save has left. Return the lowest validation loss of all checkpoints so far.

        The kill may have come before its renaming, or before the link `best`, deletions and the copy that follow it.
        """
        with explain_unwritable(self.folder.parent):
            for path in checkpoint_folders(self.folder):
                if step_number(path) > steps_before:
                    set_aside(path)
            for incomplete in self.folder.glob(".step-*"):
                try:
                    remove(incomplete)
                except OSError as error:
                    warn(f"{incomplete} is of a killed save and cannot be deleted: {error.strerror}")
        best = self._lowest_loss()
        for newest in checkpoint_folders(self.folder)[:1]:
            loss = read_manifest(newest)["val_loss"]
            is_best = loss is not None and loss < best
            best = loss if is_best else best
            try:
                self._prune(newest, is_best)
            except UserError as error:
                warn(error)
            if self.replica and not (self.replica / newest.name).exists():
                self._replicate(newest, self.replica / newest.name)
        return best

    def _best(self) -> Path:
        """Return the checkpoint that the link `best` names. It is in this folder, wherever the link leads."""
        best = self.folder / "best"
        return self.folder / best.readlink().name if best.is_symlink() else best

    def _lowest_loss(self) -> float:
        """Return the validation loss of `best`; infinity if `best` is missing or damaged.

        Raises Unreadable if it cannot be read, because a worse checkpoint would replace it.
        """
        best = self._best()
        try:
            loss = read_manifest(best)["val_loss"] if is_real_folder(best) else None
            return math.inf if loss is None else loss
        except Unreadable:
            raise
        except UserError as error:
            warn(error)
            return math.inf

    def _wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending and (error := pending.exception()) and self.ranks.is_main:  # rank 0 raises it for all ranks
            raise error

    def _copy_to_host(self, state: State) -> tuple[State, torch.cuda.Event | None]:
        """Copy the state to host memory on rank 0. Returns (the copies, the event after which they are complete).

        On a GPU the copies run in a stream of their own while the training continues. On a CPU the event is None.
        """
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
        self,
        temporary: Path,
        state: State,
        rest: dict,
        facts: dict,
        ready: Future | torch.cuda.Event | None,
        is_best: bool,
    ) -> None:
        """Write a checkpoint to `temporary`, rename it, and delete old checkpoints. The thread runs this.

        It first waits for `ready`: the future of all shards, or the event of the copies. Raises UserError if the
        checkpoint cannot be written.
        """
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
            room = f"earlier checkpoints stay{free_room(self.folder)}"
            raise UserError(f"{final} could not be written: {reason}; {room}") from error
        self._prune(final, is_best)
        if self.replica:
            self._replicate(final, self.replica / final.name)

    def _prune(self, newest: Path, is_best: bool) -> None:
        """Let `best` point to the newest checkpoint if `is_best`, and delete old checkpoints.

        The newest `keep` checkpoints and the best one stay. Raises UserError if a file cannot be changed.
        """
        best = self.folder / "best"
        try:
            if is_best:
                if is_real_folder(best):  # the folder was copied with a tool that follows links
                    shutil.rmtree(best)
                link = self.folder / ".best"
                link.unlink(missing_ok=True)
                link.symlink_to(newest.name)
                link.replace(best)
            for left in self.folder.glob(".step-*-old"):  # of a deletion that failed
                remove(left)
            for path in checkpoint_folders(self.folder)[self.keep :]:
                if path != self._best():
                    discard(path)
        except OSError as error:
            raise UserError(f"old checkpoints in {self.folder} cannot be deleted: {error.strerror}") from error

    def _replicate(self, newest: Path, copy: Path) -> None:
        """Copy the newest checkpoint, verify the copy, and delete the other copies. A failure is only a warning."""
        temporary = copy.with_name(f".{copy.name}")
        try:
            for incomplete in copy.parent.glob(".step-*"):  # of a copy that was killed
                remove(incomplete)
            copy_folder(newest, temporary)
            for path in [*temporary.rglob("*"), temporary]:
                fsync(path)
            verify(temporary)
            discard(copy)
            temporary.rename(copy)
            fsync(copy.parent)
            for path in checkpoint_folders(copy.parent):
                if path != copy:
                    shutil.rmtree(path)
        except (OSError, UserError, MemoryError) as error:
            shutil.rmtree(temporary, ignore_errors=True)  # it would use the space of the next copy
            reason = getattr(error, "strerror", None) or str(error) or class_and_message(error)
            warn(f"{newest} has no copy in {copy.parent}: {reason}")


def free_room(folder: Path) -> str:
    """Return the free room of the disk for an error; nothing if the disk does not answer."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(next(parent for parent in folder.parents if parent.is_dir())).free
        return f", and {free / 2**30:.1f} GiB are free"
    return ""


def wait_for_shards(written: Future) -> None:
    """Wait until all ranks have written their shards. Raises OSError with the reason of the first rank that failed."""
    from runtime.sharded import CheckpointException, reason_of

    try:
        written.result()
    except CheckpointException as error:
        raise OSError(reason_of(error)) from error


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint step-N to damaged-step-N, or -2, -3 and so on, and print where it is.

    Nobody reads it again, and nobody deletes it. Raises UserError if it cannot be renamed.
    """
    numbers = itertools.count(2)
    new = path.with_name(f"damaged-{path.name}")
    while os.path.lexists(new):
        new = path.with_name(f"damaged-{path.name}-{next(numbers)}")
    try:
        path.rename(new)
    except OSError as error:
        raise UserError(f"{path} is damaged and cannot be renamed: {error.strerror}; move it away") from error
    warn(f"{path} is damaged and is now {new}; delete it if nobody needs it")


def discard(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, because a kill during the deletion would leave a damaged checkpoint."""
    if os.path.lexists(path):
        hidden = path.with_name(f".{path.name}-old")
        path.rename(hidden)
        remove(hidden)


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder. It ends at the first error, while shutil.copytree() would try every other file, too."""
    target.mkdir(parents=True)
    for path in sorted(source.rglob("*")):  # a folder comes before its files
        if path.is_dir():
            (target / path.relative_to(source)).mkdir()
        else:
            shutil.copyfile(path, target / path.relative_to(source))


def remove(path: Path) -> None:
    """Delete a folder, a file or a link; never what a link leads to."""
    if is_real_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink()


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
