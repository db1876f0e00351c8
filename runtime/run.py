"""Write a run's folder.

out/<run>/config.yaml     the resolved config, for people: the row and checkpoints have it, too
          metrics.jsonl   one line for each logged step
          result.json     the row: status, config, kernels, env and the figures (runtime/row.py)
          checkpoints/    see runtime/checkpoint.py
"""

import contextlib
import json
import os
import time
from pathlib import Path

from omegaconf import OmegaConf

from common.files import add_crc32, check_regular, open_regular, read_bytes, read_line, write_atomically
from common.terminal import one_line, warn
from runtime.checkpoint_folder import best_or_newest
from runtime.command import command_line
from runtime.config import UserError, check, made_folders
from runtime.folders import explain_unwritable
from runtime.manifest import MANIFEST
from runtime.ranks import Ranks
from runtime.row import UNFINISHED, lock_folder, status_of, without_nonfinite, write_row
from runtime.trackers import LoggerConfig, Tracker


class Run:
    """A context manager that writes `result.json` when its block ends, also after an error.

    `row` is the result row so far. A new run writes its name and command at once, with the status UNFINISHED, and
    begin() writes the whole row. At the end the status becomes `ok`, `oom` or `failed: why`; an attribute `status` of
    the exception, such as `unavailable`, replaces `failed`.

    With `resume`, the folder may hold an earlier run. A run that ended before its first step is always overwritten.
    Raises UserError if the folder holds another run, if a running process uses it, or if it cannot be written.
    """

    def __init__(self, folder: Path, name: str, config: object, tracker: Tracker, resume: bool = False):
        self.folder, self.tracker, self.has_begun = folder, tracker, False
        self.lines = 0  # of metrics.jsonl
        self.lost_line: tuple[int, dict] | None = None  # (step, figures) of a line that a kill lost; begin() writes it
        self.config = OmegaConf.structured(config)
        self.row = {
            "name": name,
            "status": UNFINISHED,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": command_line(),
            "config": OmegaConf.to_container(self.config),
        }
        files = [folder / file for file in ("config.yaml", "metrics.jsonl", "result.json", "checkpoints")]
        config_file, metrics, self.result, checkpoints = files
        with explain_unwritable(folder), contextlib.ExitStack() as open_files:
            self.lock = open_files.enter_context(lock_folder(folder))
            if metrics.exists() and check_regular(metrics).st_size == 0 and not checkpoints.exists():
                for path in (config_file, metrics, self.result):
                    path.unlink(missing_ok=True)
            existing = [path.name for path in files if path.exists()]
            if existing and not resume:
                advice = "choose another folder, or delete it"
                if hasattr(config, "train"):
                    advice = "choose another folder, delete it, or resume the run: train.resume=auto"
                raise UserError(f"out_dir={folder} already holds a run ({existing[0]}); {advice}")
            # Line by line, so that a kill loses no line
            self.metrics = open_files.enter_context(open_regular(metrics, "a", buffering=1))
            self.is_new = not self.result.exists()
            if self.is_new:
                write_row(folder, {key: self.row[key] for key in ("name", "status", "started", "command")})
            open_files.pop_all()  # close() closes them

    def truncate_metrics(self, step: int, expected: int = 0, figures: dict | None = None) -> None:
        """Keep the lines of metrics.jsonl up to `step`. A resumed run logs the later steps again.

        Damaged lines and an incomplete last line are dropped with a warning. `expected` is the number of lines that the
        checkpoint records: a warning says how many are missing. If only the last one is, begin() writes `figures`.
        """
        path, kept, later, damaged, last = self.folder / "metrics.jsonl", [], 0, 0, 0
        with explain_unwritable(self.folder):
            lines = read_bytes(path).splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                entry = read_line(line[:-1]) if line.endswith(b"\n") else None
                if entry is not None and entry["step"] <= step:
                    kept.append(line)
                    last = entry["step"]
                    self._add_val_loss(entry)
                else:
                    later += 1
            except (ValueError, KeyError, TypeError, RecursionError):
                warn(f"{path}: line {number} is damaged and is left out")
                if not later:
                    damaged += 1
        has_lines = bool(lines) or not self.is_new  # a run that continues another one in a new folder has no lines yet
        if figures and has_lines and last != step:
            self.lost_line = step, figures
        lost = expected - len(kept) - damaged - (1 if self.lost_line else 0)
        if lost > 0 and has_lines:
            warn(f"{path} has lost {lost} {'line' if lost == 1 else 'lines'} up to step {step}")
        self.lines = len(kept)
        if kept != lines:
            with explain_unwritable(self.folder):
                write_atomically(path, b"".join(kept))
                self.metrics.close()
                self.metrics = open_regular(path, "a", buffering=1)

    def begin(self, **facts: dict) -> None:
        """Add `facts` to the row, write row and config, and start the tracker. Call this when everything is built."""
        self.has_begun = True
        self.row.update(facts)
        with explain_unwritable(self.folder):
            write_atomically(self.folder / "config.yaml", OmegaConf.to_yaml(self.config).encode())
            write_row(self.folder, self.row)
        self.tracker.start(self.folder, self.row)
        if self.lost_line:
            self.log(*self.lost_line)

    def add_files(self, files: dict[str, bytes]) -> None:
        """Write files, name -> content, beside the row. Raises UserError if that fails."""
        with explain_unwritable(self.folder):
            for name, content in files.items():
                write_atomically(self.folder / name, content)

    def log(self, step: int, figures: dict) -> None:
        """Write a line of metrics.jsonl, null for NaN, and pass it to the tracker. Raises UserError if that fails."""
        self._check_folder()
        figures = without_nonfinite(figures)
        with explain_unwritable(self.folder):
            self.metrics.write(add_crc32(json.dumps({"step": step, **figures})) + "\n")
            self.lines += 1
        self._add_val_loss(figures)
        self.tracker.log(step, figures)

    def _add_val_loss(self, figures: dict) -> None:
        """Keep the lowest validation loss of metrics.jsonl in the row."""
        if (loss := figures.get("val/loss")) is not None:
            self.row["val/loss/min"] = min(loss, self.row.get("val/loss/min", loss))

    def _check_folder(self) -> None:
        """Raise UserError if the folder was deleted or replaced, because the file that log() writes is then lost."""
        path = self.folder / "metrics.jsonl"
        with explain_unwritable(self.folder):
            is_same = path.exists() and os.path.samestat(path.stat(), os.fstat(self.metrics.fileno()))
        if not is_same:
            raise UserError(f"{path} was deleted or replaced during the run, and its record is lost; start it again")

    def write_sample(self, text: str) -> None:
        """Write a text that the model generated to sample.txt, and pass it to the tracker."""
        with explain_unwritable(self.folder):
            write_atomically(self.folder / "sample.txt", text.encode())
        self.tracker.log_table("sample", ["text"], [[text]])

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if error is None:
                self._check_folder()
        except UserError as lost:
            error = lost
            raise
        finally:
            self.close(status_of(error))

    def close(self, status: str) -> None:
        """Write the row, and unlock the folder. A resumed run that failed before begin() does not change the row.

        If an error ends the run before begin(), the folder is deleted, unless it existed before or a tracker uses it.
        Raises UserError if the row of a run that is ok cannot be written.
        """
        unwritten = None
        if self.has_begun or self.is_new:
            try:
                self._write_row(status)
            except UserError as error:
                unwritten = error
                self.row["status"] = f"failed: {error}" if status == "ok" else status
            if not self.has_begun:  # the tracker gets a run that could not be built, too, with its status
                self.tracker.start(self.folder, self.row)
        with contextlib.suppress(OSError):  # a line that could not be written is still in the buffer
            self.metrics.close()
        if self.row["status"] == "ok" and self.tracker.config.artifacts:
            self._upload_checkpoint()
        self.tracker.finish(self.row)
        if line := self.tracker.view_line(self.folder):
            print(line)
        own = {self.folder / "metrics.jsonl", self.result, self.folder / ".lock"}
        is_refused = not (self.has_begun or status == "oom" or status.startswith("stopped"))
        with contextlib.suppress(OSError):  # the folder stays
            if is_refused and self.folder in made_folders and own.issuperset(self.folder.iterdir()):
                for path in own:
                    path.unlink(missing_ok=True)
        self.lock.close()
        if unwritten and status == "ok":
            raise unwritten
        if unwritten:
            warn(unwritten)

    def _upload_checkpoint(self) -> None:
        """Pass the best checkpoint to the tracker. A failure is only a warning."""
        try:
            found = best_or_newest(self.folder / "checkpoints")
            check(found is not None, f"{self.folder} has no checkpoint")
        except (OSError, UserError) as error:
            warn(f"logger.artifacts=true: nothing is uploaded: {one_line(error)}")
            return
        path, facts = found
        files = [MANIFEST, *facts["files"]]
        self.tracker.log_checkpoint(path, files, without_nonfinite({key: facts[key] for key in ("step", "val_loss")}))

    def record(self, status: str) -> None:
        """Write the row with this status, before the end of the run. A full disk is a warning."""
        try:
            self._write_row(status)
        except UserError as error:
            warn(error)

    def _write_row(self, status: str) -> None:
        self.row |= {"status": status, "metrics_lines": self.lines}
        with explain_unwritable(self.folder):
            write_row(self.folder, self.row)


class SilentRun(Run):
    """The run on all ranks but rank 0. It writes nothing, because rank 0 writes the files."""

    def __init__(self, folder: Path):
        self.folder, self.row, self.lines = folder, {}, 0

    def begin(self, **facts: dict) -> None:
        self.row.update(facts)

    def do_nothing(self, *_) -> None: ...

    truncate_metrics = log = write_sample = close = record = _check_folder = do_nothing


def open_run(folder: Path, name: str, config: object, logger: LoggerConfig, resume: bool, ranks: Ranks) -> Run:
    """Return the run on this rank. If rank 0 hangs, its run is closed all the same."""
    ranks.watchdog.folder = folder
    if not ranks.is_main:
        return SilentRun(folder)
    run = Run(folder, name, config, Tracker(logger), resume)
    ranks.watchdog.on_stuck = lambda reason: run.close(f"failed: {reason}")
    return run
