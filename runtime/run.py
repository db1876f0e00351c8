"""A run's folder and the one row that it leaves.

out/<run>/config.yaml     the resolved config
          metrics.jsonl   a line a logged step
          result.json     one row: status, config, kernels, env and the figures
"""

import json
import sys
import time
from pathlib import Path

from omegaconf import OmegaConf

from runtime.config import UserError
from runtime.trackers import Tracker


class OutOfMemory(UserError):
    """The device's memory is not enough; the message says what was tried and what to lower."""

    status = "oom"


class Run:
    """A context manager around the work: however that ends, `result.json` says how.

    `row` is the result row while it grows. Its status becomes `ok`, `oom`, `unavailable: why` or `failed: why`; an
    exception names its own word in an attribute `status`. UserError: the folder already holds a run.
    """

    def __init__(self, folder: Path, config: object, tracker: Tracker):
        self.folder, self.tracker = folder, tracker
        resolved = OmegaConf.structured(config)
        self.row = {
            "name": folder.name,
            "status": "running",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": " ".join(["python", *sys.argv]),
            "config": OmegaConf.to_container(resolved),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.metrics = (folder / "metrics.jsonl").open("x", buffering=1)  # by the line: a kill loses none
            OmegaConf.save(resolved, folder / "config.yaml")
        except FileExistsError:
            raise UserError(f"out_dir={folder} already holds a run; choose another folder, or delete it") from None
        except OSError as error:
            raise UserError(f"out_dir={folder} cannot be written: {error.strerror}; choose another folder") from None

    def begin(self, **facts: dict) -> None:
        """`facts` (kernels, env) go into the row, and the tracker starts."""
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
    return word if word == "oom" else f"{word}: {error or type(error).__name__}"
