"""The folder `checkpoints` of a run: which checkpoints stay, the link `best`, and the copy on another disk."""

import itertools
import math
import os
import shutil
from pathlib import Path

from runtime.checkpoint import checkpoint_folders, is_real_folder, verify
from runtime.config import UserError
from runtime.folders import explain_unwritable
from runtime.manifest import Unreadable, fsync, read_manifest, step_number
from terminal import class_and_message, warn


class CheckpointFolder:
    """The newest `keep` checkpoints, and the one with the lowest validation loss.

    With `replicate_to`, the folder replicate_to/RUN has a copy of the newest checkpoint.
    """

    def __init__(self, path: Path, keep: int, replicate_to: str | None):
        self.path, self.keep = path, keep
        self.replica = Path(replicate_to) / path.parent.name if replicate_to else None

    def begin(self, steps_before: int) -> float:
        """Complete what a killed save has begun, and return the lowest validation loss of all checkpoints so far.

        The kill may have come before the renaming of the checkpoint, or before what complete() does. The run resumes
        after step `steps_before`, so every later checkpoint is damaged, and moves aside. Raises UserError if one cannot
        be moved, and Unreadable if the folder or its best checkpoint cannot be read.
        """
        with explain_unwritable(self.path.parent):
            for path in checkpoint_folders(self.path):
                if step_number(path) > steps_before:
                    set_aside(path)
            for incomplete in self.path.glob(".step-*"):
                try:
                    remove(incomplete)
                except OSError as error:
                    warn(f"{incomplete} is of a killed save and cannot be deleted: {error.strerror}")
        best = self._lowest_loss()
        for newest in checkpoint_folders(self.path)[:1]:
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

    def complete(self, newest: Path, is_best: bool) -> None:
        """Do what follows the renaming of the newest checkpoint. Raises UserError if old ones cannot be deleted."""
        self._prune(newest, is_best)
        if self.replica:
            self._replicate(newest, self.replica / newest.name)

    def _best(self) -> Path:
        """Return the checkpoint that the link `best` names. It is in this folder, wherever the link leads."""
        best = self.path / "best"
        return self.path / best.readlink().name if best.is_symlink() else best

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

    def _prune(self, newest: Path, is_best: bool) -> None:
        """Let `best` point to the newest checkpoint if `is_best`, and delete old checkpoints.

        The newest `keep` checkpoints and the best one stay. Raises UserError if that cannot be done.
        """
        best = self.path / "best"
        try:
            if is_best:
                if is_real_folder(best):  # the folder was copied with a tool that follows links
                    shutil.rmtree(best)
                link = self.path / ".best"
                link.unlink(missing_ok=True)
                link.symlink_to(newest.name)
                link.replace(best)
            for left in self.path.glob(".step-*-old"):  # of a deletion that failed
                remove(left)
            for path in checkpoint_folders(self.path)[self.keep :]:
                if path != self._best():
                    discard(path)
        except OSError as error:
            raise UserError(f"old checkpoints in {self.path} cannot be deleted: {error.strerror}") from error

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
