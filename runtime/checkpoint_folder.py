"""The folder `checkpoints` of a run: which checkpoints stay, the link `best`, and the copy on another disk."""

import contextlib
import itertools
import math
import os
import shutil
from pathlib import Path

from common.files import read_bytes
from common.terminal import one_line, warn
from runtime.checkpoint import checkpoint_folders, is_real_folder, verify
from runtime.config import UserError, check
from runtime.folders import explain_unwritable
from runtime.manifest import MANIFEST, Unreadable, fsync, read_manifest, step_number


class CheckpointFolder:
    """The newest `keep` checkpoints, the best one, and with `replicate_to` a copy of the newest in replicate_to/RUN."""

    def __init__(self, path: Path, keep: int, replicate_to: str | None):
        self.path, self.keep, self.lowest_loss = path, keep, math.inf
        self.replica = Path(replicate_to) / path.parent.resolve().name if replicate_to else None

    def begin(self, steps_before: int) -> float:
        """Repair what a kill has left. Returns the lowest validation loss of the checkpoints; infinity without one.

        The run resumes after step `steps_before`, so every later checkpoint is damaged, and moves aside. Raises
        UserError if one cannot be moved, if the copy would replace another run's copy, or if the folder is unreadable.
        """
        self._check_replica(steps_before)
        with explain_unwritable(self.path.parent):
            for path in checkpoint_folders(self.path):
                if step_number(path) > steps_before:
                    set_aside(path)
            for incomplete in self.path.glob(".step-*"):
                try:
                    remove(incomplete)
                except OSError as error:
                    warn(f"a killed save left {incomplete}, which cannot be deleted: {error.strerror}")
            best = self._best()
            losses = self._losses(best)
        if not losses:
            return math.inf
        lowest = min(losses, key=losses.get)
        self.lowest_loss = losses[lowest]
        if lowest != best:
            try:
                self._link_best(lowest)
            except (OSError, UserError) as error:
                warn(f"{self.path / 'best'} cannot point to {lowest.name}: {one_line(error)}")
        return self.lowest_loss

    def complete(self, newest: Path, loss: float | None) -> None:
        """After the rename of the newest checkpoint: set `best`, delete old checkpoints, and copy the newest one.

        `loss` is its validation loss. Raises UserError if `best` or an old checkpoint cannot be changed.
        """
        with explain_unwritable(self.path.parent):
            if loss is not None and loss < self.lowest_loss:
                self._link_best(newest)
                self.lowest_loss = loss
            self._delete_old()
        self.replicate(newest)

    def replicate(self, newest: Path) -> None:
        """Make a verified copy of the newest checkpoint, and delete the other copies. A failure is only a warning."""
        if not self.replica:
            return
        copy, temporary = self.replica / newest.name, self.replica / f".{newest.name}"
        try:
            for incomplete in self.replica.glob(".step-*"):  # of a copy that was killed
                remove(incomplete)
            if not is_copy(newest, copy):
                copy_folder(newest, temporary)
                for path in [*temporary.rglob("*"), temporary]:
                    fsync(path)
                verify(temporary)
                discard(copy)
                temporary.rename(copy)
                fsync(self.replica)
            for path in checkpoint_folders(self.replica):
                if path != copy:
                    shutil.rmtree(path)
        except (OSError, UserError, MemoryError) as error:
            shutil.rmtree(temporary, ignore_errors=True)  # it would use the space of the next copy
            warn(f"{newest} has no copy in {self.replica}: {one_line(error)}")

    def _check_replica(self, steps_before: int) -> None:
        """Raise UserError if the copy would delete the checkpoints of another run, or the last ones of a lost run."""
        if not self.replica:
            return
        for path in (self.replica / "metrics.jsonl", self.replica / "best", self.replica.parent / "metrics.jsonl"):
            in_use = f"train.replicate_to: {self.replica} is in the folder of a run; choose another folder"
            check(not os.path.lexists(path), in_use)
        copies = []
        with contextlib.suppress(Unreadable):  # replicate() prints a warning
            copies = checkpoint_folders(self.replica)
        if copies and steps_before == 0:
            raise UserError(
                f"train.replicate_to: {self.replica} holds the copy of another run of this name, {copies[0].name}, and "
                "this run is new: resume from the copy with train.resume, move it away, or choose another folder"
            )

    def _best(self) -> Path:
        """Return the checkpoint that the link `best` names. It is in this folder, wherever the link leads."""
        best = self.path / "best"
        return self.path / best.readlink().name if best.is_symlink() else best

    def _losses(self, best: Path) -> dict[Path, float]:
        """Return the finite validation loss of each checkpoint that has one, `best` first.

        A damaged `best` moves aside. Raises Unreadable if `best` cannot be read, because another one would replace it.
        """
        losses = {}
        for path in dict.fromkeys([best, *checkpoint_folders(self.path)]):
            try:
                loss = read_manifest(path)["val_loss"] if is_real_folder(path) else None
            except UserError as error:
                if path != best:
                    continue
                if isinstance(error, Unreadable):
                    raise
                warn(error)
                set_aside(path)
                continue
            if loss is not None and math.isfinite(loss):
                losses[path] = loss
        return losses

    def _link_best(self, path: Path) -> None:
        """Let `best` point to this checkpoint. Raises OSError."""
        best, link = self.path / "best", self.path / ".best"
        if is_real_folder(best):  # the folder was copied with a tool that follows links
            shutil.rmtree(best)
        if os.path.lexists(link):  # of a killed save
            remove(link)
        link.symlink_to(path.name)
        link.replace(best)

    def _delete_old(self) -> None:
        """Delete all but the newest `keep` checkpoints and the best one. Raises OSError."""
        for left in self.path.glob(".step-*-old"):  # of a deletion that failed
            remove(left)
        for path in checkpoint_folders(self.path)[self.keep :]:
            if path != self._best():
                discard(path)


def best_or_newest(folder: Path) -> tuple[Path, dict] | None:
    """Return the valid checkpoint with the lowest validation loss in a `checkpoints` folder, and its manifest.

    If none has a finite loss, it is the newest. None without a valid checkpoint. A damaged one is skipped with a
    warning. Raises Unreadable.
    """
    losses = {}
    for path in checkpoint_folders(folder):  # the newest first, and sorted() keeps this order among equal losses
        try:
            loss = read_manifest(path)["val_loss"]
        except Unreadable:
            raise
        except UserError as error:
            warn(f"{error}; it is skipped")
        else:
            losses[path] = loss if loss is not None and math.isfinite(loss) else math.inf
    for path in sorted(losses, key=losses.get):
        try:
            return path, verify(path)
        except Unreadable:
            raise
        except UserError as error:
            warn(error)
    return None


def is_copy(source: Path, target: Path) -> bool:
    """Return whether `target` is a valid copy of a checkpoint. Raises OSError if a manifest cannot be read."""
    try:
        return read_bytes(target / MANIFEST) == read_bytes(source / MANIFEST) and bool(verify(target))
    except (FileNotFoundError, UserError):
        return False


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint step-N to damaged-step-N (-2, -3, ...), which no command deletes. Raises OSError."""
    numbers = itertools.count(2)
    new = path.with_name(f"damaged-{path.name}")
    while os.path.lexists(new):
        new = path.with_name(f"damaged-{path.name}-{next(numbers)}")
    path.rename(new)
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
