"""A run's folder and the one row that it leaves.

out/<run>/config.yaml     the resolved config
          metrics.jsonl   a line a logged step
          result.json     one row: status, config, kernels, env and the figures
"""

import json
import time
from pathlib import Path

from omegaconf import OmegaConf

from runtime.config import UserError, command
from runtime.trackers import Tracker


class OutOfMemory(UserError):
    """The device's memory is not enough; the message says what was tried and what to lower."""

    status = "oom"


class Run:
    """A context manager around the work: however that ends, short of a kill, `result.json` says how.

    `row` is the result row while it grows. Its status becomes `ok`, `oom`, `unavailable: why` or `failed: why`; an
    exception names its own word in an attribute `status`. UserError: the folder already holds a run, or files that
    would be overwritten (a run that ended without a single step gives its folder up).
    """

    def __init__(self, folder: Path, name: str, config: object, tracker: Tracker):
        self.folder, self.tracker = folder, tracker
        resolved = OmegaConf.structured(config)
        self.row = {
            "name": name,
            "status": "running",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": command(),
            "config": OmegaConf.to_container(resolved),
        }
        config_file, metrics, result = (folder / file for file in ("config.yaml", "metrics.jsonl", "result.json"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if result.exists() and metrics.exists() and metrics.stat().st_size == 0:
                for path in (config_file, metrics, result):
                    path.unlink(missing_ok=True)
            if taken := [path.name for path in (config_file, metrics, result) if path.exists()]:
                raise UserError(f"out_dir={folder} already holds a run ({taken[0]}); choose another, or delete it")
            self.metrics = metrics.open("x", buffering=1)  # by the line: a kill loses none
            OmegaConf.save(resolved, config_file)
        except OSError as error:
            raise UserError(f"out_dir={folder} cannot be written: {error.strerror}; choose another folder") from None

    def begin(self, **facts: dict) -> None:
        """All is built: `facts` go into the row beside its kernels and env, and the tracker starts."""
        self.row.update(facts)
        self.tracker.start(self.folder, self.row)

    def log(self, step: int, figures: dict) -> None:
        """One line of `metrics.jsonl`, and the same to the tracker."""
        self.metrics.write(json.dumps({"step": step, **figures}) + "\n")
        self.tracker.log(step, figures)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.row["status"] = status(error)
        self.metrics.close()
        temporary = self.folder / ".result.json"
        temporary.write_text(json.dumps(self.row, indent=1) + "\n")
        temporary.replace(self.folder / "result.json")
        self.tracker.finish(self.row)


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
