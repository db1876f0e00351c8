"""A run's folder and the one row that it leaves.

out/<run>/config.yaml     the resolved config
          metrics.jsonl   a line a logged step
          result.json     one row: status, config, kernels, env and the figures
          checkpoints/    see runtime/checkpoint.py
"""

import contextlib
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from omegaconf import OmegaConf

from runtime.config import UserError, command
from runtime.trackers import Tracker


class Run:
    """A context manager around the work: however that ends, short of a kill, `result.json` says how.

    `row` is the result row while it grows. Its status becomes `ok`, `oom`, `unavailable: why`, `stopped: why` or
    `failed: why`; an exception names its own word in an attribute `status`. `resume` goes on in the folder of a run
    that ended. UserError: the folder already holds a run, files that would be overwritten (a run that ended without a
    single step gives its folder up), or a run that is still going on.
    """

    def __init__(self, folder: Path, name: str, config: object, tracker: Tracker, resume: bool = False):
        self.folder, self.tracker, self.begun = folder, tracker, False
        self.config = OmegaConf.structured(config)
        self.row = {
            "name": name,
            "status": "running",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": command(),
            "config": OmegaConf.to_container(self.config),
        }
        files = [folder / file for file in ("config.yaml", "metrics.jsonl", "result.json", "checkpoints")]
        metrics, self.result = files[1:3]
        with writable(folder):
            self.lock = lock(folder)
            if metrics.exists() and metrics.stat().st_size == 0 and not files[3].exists():
                for path in files[:3]:
                    path.unlink(missing_ok=True)
            if not resume and (taken := [path.name for path in files if path.exists()]):
                ways = ["choose another", "delete it"] + ["go on with it: train.resume=auto"] * hasattr(config, "train")
                raise UserError(
                    f"out_dir={folder} already holds a run ({taken[0]}); {', '.join(ways[:-1])}, or {ways[-1]}"
                )
            self.metrics = metrics.open("a", buffering=1)  # by the line: a kill loses none

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`, which a resumed run does again, and a line that a kill cut short."""
        path, kept = self.folder / "metrics.jsonl", 0
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):  # a power cut leaves zeros
                break
            kept += len(line)
        os.truncate(path, kept)

    def begin(self, **facts: dict) -> None:
        """All is built: `facts` go into the row beside its kernels and env, and the tracker starts."""
        self.begun = True
        self.row.update(facts)
        OmegaConf.save(self.config, self.folder / "config.yaml")
        self.tracker.start(self.folder, self.row)

    def log(self, step: int, figures: dict) -> None:
        """One line of `metrics.jsonl`, and the same to the tracker; what is not finite is null, as JSON wants it."""
        figures = finite(figures)
        try:
            self.metrics.write(json.dumps({"step": step, **figures}) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be written any more: {error.strerror}; make room, and resume"
            ) from None
        self.tracker.log(step, figures)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close(status(error))

    def close(self, status: str) -> None:
        """Write the row, and let the folder go. One that went on but failed before it began leaves all as it was."""
        if self.begun or not self.result.exists():
            self.record(status)
        with contextlib.suppress(OSError):  # the line that could not be written
            self.metrics.close()
        self.tracker.finish(self.row)
        self.lock.close()

    def record(self, status: str) -> None:
        """Write the row as it is now. Where the disk is full, say so: what ended the run is said by others."""
        self.row["status"] = status
        try:
            write_row(self.folder, self.row)
        except OSError as error:
            print(f"warning: {self.result} cannot be written: {error.strerror}", file=sys.stderr)


class Follower(Run):
    """The run on a rank that does not lead: it writes nothing."""

    def __init__(self, folder: Path):
        self.folder, self.row = folder, {}

    def rewind(self, step: int) -> None:
        """Rank 0 does it."""

    def begin(self, **facts: dict) -> None:
        self.row.update(facts)

    def log(self, step: int, figures: dict) -> None:
        """Rank 0 does it."""

    def close(self, status: str) -> None:
        """Rank 0 does it."""

    def record(self, status: str) -> None:
        """Rank 0 does it."""


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """UserError, where what is written within cannot be."""
    try:
        yield
    except OSError as error:
        raise UserError(f"out_dir={folder} cannot be written: {error.strerror}; choose another folder") from None


def lock(folder: Path) -> TextIO:
    """Make the folder, and keep other processes out until this one ends, in whatever way, or closes the file."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"out_dir={folder} is in use by a run that goes on; choose another folder") from None
    return file


def write_row(folder: Path, row: dict) -> None:
    temporary = folder / ".result.json"
    temporary.write_text(json.dumps(finite(row), indent=1) + "\n")
    temporary.replace(folder / "result.json")


def read_row(folder: Path) -> dict | None:
    """The row in a run's folder; None where there is none, or none that can be read."""
    try:
        row = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("status"), str) else None


def finite(figures: dict) -> dict:
    """The same with None in place of NaN and infinities."""
    return {key: _finite(value) for key, value in figures.items()}


def _finite(value):
    if isinstance(value, dict):
        return finite(value)
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def status(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    word = getattr(error, "status", "failed")
    return word if word == "oom" else f"{word}: {str(error) or type(error).__name__}"


def new_folder(parent: Path, name: str) -> Path:
    """`parent/name`, made now; or `name-2`, `-3`, ... where other runs began in the same second."""
    folder, number = parent / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = parent / f"{name}-{number}"
        except OSError as error:
            raise UserError(f"{parent} cannot be written: {error.strerror}; choose an out_dir") from None
