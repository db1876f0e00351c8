"""Change one file of a run, or put something else in its place."""

import os
import random
import shutil
from pathlib import Path

from common.files import read_bytes
from runtime.checkpoint import checkpoint_folders
from tests.crashtest.faults import REPLACEMENTS, Fault


class Damage:
    """The damage of one file below `folder`, which holds a run's folder `run` and its data in `data`.

    `description` says what was done; it is None if there is no file to damage.
    """

    def __init__(self, fault: Fault, folder: Path):
        rng = random.Random(fault.seed)
        how, _, what = fault.kind.partition(" in ")
        files = files_of(folder, rng.choice(["checkpoint", "run", "data"]) if fault.kind in REPLACEMENTS else what)
        files = [path for path in files if fault.kind in REPLACEMENTS or path.stat().st_size]
        self.path = rng.choice(files) if files else None
        self.description = None
        if self.path:
            self.before, self.mode = read_bytes(self.path), self.path.stat().st_mode
            detail = self._put(how) if fault.kind in REPLACEMENTS else self._change(how, rng)
            self.description = f"{how} in {self.path.relative_to(folder)}{detail}"

    @property
    def in_checkpoint(self) -> bool:
        return self.path is not None and "checkpoints" in self.path.parts

    @property
    def stays(self) -> bool:
        """Whether the file still cannot be read, because a finished run does not need it."""
        return not (self.path.is_file() and os.access(self.path, os.R_OK))

    def _change(self, how: str, rng: random.Random) -> str:
        place, bit = rng.randrange(len(self.before)), rng.randrange(8)
        after = bytearray(self.before[:place] if how == "cut" else self.before)
        if how == "flip":
            after[place] ^= 1 << bit
        self.path.write_bytes(after)
        return f", byte {place:,}"

    def _put(self, what: str) -> str:
        if what == "mode 000":
            self.path.chmod(0)
            return ""
        self.path.unlink()
        if what == "FIFO":
            os.mkfifo(self.path)
        elif what == "folder":
            self.path.mkdir()
        else:
            self.path.symlink_to("/dev/zero" if what == "/dev/zero" else "missing")
        return ""

    def undo(self) -> None:
        """Bring the file back, unless its folder was moved."""
        if self.path.parent.exists():
            if self.path.is_dir() and not self.path.is_symlink():
                shutil.rmtree(self.path)
            self.path.unlink(missing_ok=True)
            self.path.write_bytes(self.before)
            self.path.chmod(self.mode)


def files_of(folder: Path, what: str) -> list[Path]:
    """Return the files of the newest of two or more checkpoints, of the run without its checkpoints, or of the data.

    A tracker's own files are not among them.
    """
    checkpoints = checkpoint_folders(folder / "run/checkpoints")
    if what == "checkpoint":
        root, others = checkpoints[0] if len(checkpoints) > 1 else folder / "nothing", ()
    else:
        root, others = folder / what, ("checkpoints", "wandb", "tensorboard")
    files = [path for path in root.rglob("*") if path.is_file() and path.relative_to(root).parts[0] not in others]
    return sorted(files)
