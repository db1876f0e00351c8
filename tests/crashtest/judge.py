"""Decide whether a disturbed run was lost."""

import functools
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from lab.rows import read_jsonl
from runtime.checkpoint import checkpoint_folders, verify
from runtime.config import UserError
from runtime.manifest import read_manifest
from runtime.row import read_row
from tests.crashtest.damage import Damage
from tests.crashtest.faults import DAMAGES, ERRORS, KILL, KILL_AT, KINDS, REPLACEMENTS, Fault

FIGURES = "train/loss", "train/grad_norm", "val/loss"
READ_SECONDS = 30
OWN_NAMES = ".lock", ".wandb-id"  # of a run. Other names that begin with a dot are temporary
STEP = re.compile(r"^step 0*(\d+)/\d+ \| loss", re.MULTILINE)


class End(NamedTuple):
    """How a process ended that trained."""

    code: int | None  # None: it hung
    text: str  # what it printed

    @property
    def last_line(self) -> str:
        return (self.text.splitlines() or ["it printed nothing"])[-1].removeprefix("error: ")

    @property
    def is_refusal(self) -> bool:
        """Whether it ended with one error of one line."""
        return self.code == 1 and len(re.findall("^error: ", self.text, re.MULTILINE)) == 1


class Undisturbed:
    """What a disturbed run must equal: the run in `folder`."""

    def __init__(self, folder: Path):
        self.figures, self.row = read_figures(folder / "run"), read_row(folder / "run")
        self.names = {path.name for path in folder.rglob(".*")}
        self.keep = self.row["config"]["train"]["keep_checkpoints"]


class Hang(Exception):
    """A function that reads the files of a run did not return."""


def limit_time(method: Callable) -> Callable:
    """Decorator: raise Hang after READ_SECONDS. Otherwise a FIFO that read_row() opens would hang the judge, too."""

    @functools.wraps(method)
    def call(*arguments):
        def stop(*_):
            raise Hang("a function that reads its files hangs")

        previous = signal.signal(signal.SIGALRM, stop)
        signal.alarm(READ_SECONDS)
        try:
            return method(*arguments)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)

    return call


class Disturbed:
    """A run in `folder`/run that faults disturb. Its data are in `folder`/data, and its output in `folder`/log.txt."""

    def __init__(self, folder: Path, expected: Undisturbed):
        self.folder, self.expected, self.run = folder, expected, folder / "run"
        self.events: list[tuple[str, str]] = []  # the kind of each fault that happened, and what it did
        self.damaged_steps: set[int] = set()  # the steps whose lines in metrics.jsonl were damaged

    @limit_time
    def damage(self, fault: Fault) -> tuple[Damage, str | None]:
        """Damage a file. Returns the damage, and what is lost already: the row, if it is now read as another one."""
        steps, before = read_figures(self.run).keys(), self._row()
        damage = Damage(fault, self.folder)
        if fault.kind in REPLACEMENTS:  # the resumed run reads it, in a process of its own
            self.damaged_steps |= steps if damage.description and damage.path.name == "metrics.jsonl" else set()
            return damage, None
        self.damaged_steps |= steps - read_figures(self.run).keys()
        is_other = self._row() not in (None, before)
        return damage, "its row is now read as another one" if is_other else None

    def _row(self) -> dict | None:
        """Return the row as programs read it; None if they refuse. A damaged lock changes the text of the status."""
        row = read_row(self.run)
        if row and row["status"].startswith("stopped"):
            row["status"] = "stopped"
        return row

    @limit_time
    def valid_steps(self) -> list[int]:
        """Return the steps of the valid checkpoints, the newest first."""
        folders = checkpoint_folders(self.run / "checkpoints")
        return [int(path.name.removeprefix("step-")) for path in folders if is_valid(path)]

    @limit_time
    def check_end(self, kind: str, end: End, before: list[int], damage: Damage | None = None) -> str | None:
        """Return what is wrong with the end of a process that this kind of fault disturbed; None if nothing is.

        `before` is valid_steps() before the process started, and after the damage.
        """
        if end.code is None:
            return "it hangs"
        if "Traceback (most recent call last)" in end.text:
            return f"a traceback: {end.last_line}"
        may_refuse = damage is not None and not damage.in_checkpoint
        may_refuse |= kind in ERRORS and ERRORS[kind] != "EINTR"
        was_killed = kind in (KILL, KILL_AT, *DAMAGES) and damage is None and end.code == -signal.SIGKILL
        if not (end.code == 0 or was_killed or (may_refuse and end.is_refusal)):
            return f"exit code {end.code}: {end.last_line}"
        if end.code == 0 and (status := (read_row(self.run) or {}).get("status")) != "ok":
            return f"exit code 0, and the status {status}"
        after = self.valid_steps()
        if len(after) < min(len(before), self.expected.keep) or max(after, default=0) < max(before, default=0):
            return f"of the valid checkpoints {before} there are {after}"
        first = STEP.search(end.text)
        if first and int(first[1]) != max(before, default=0) + 1:
            return f"it went on with step {first[1]}, and the newest valid checkpoint was {max(before, default=0)}"
        return None

    @limit_time
    def find_difference(self) -> str | None:
        """Return the first difference from the undisturbed run, after the end; None if there is none.

        Its figures must be the undisturbed run's, without the lines of metrics.jsonl that were damaged. Its row must
        have the same keys, but without speeds if fewer steps than a warm-up were left. The link `best` must lead to the
        checkpoint with the lowest validation loss that is left. No temporary file may be left.
        """
        found, expected = read_figures(self.run), self.expected
        for step in sorted({*expected.figures, *found}):
            if found.get(step) != expected.figures.get(step) and not (step in self.damaged_steps and step not in found):
                return f"step {step} has {found.get(step)} instead of {expected.figures.get(step)}"
        row = read_row(self.run) or {}
        if row.get("status") != "ok":
            return f"the row has the status {row.get('status')}"
        if keys := {key for key in row.keys() ^ expected.row.keys() if not key.startswith("perf/")}:
            return f"the row has other keys: {', '.join(sorted(keys))}"
        losses, best = read_losses(self.run / "checkpoints"), os.path.realpath(self.run / "checkpoints/best")
        if losses and losses.get(os.path.basename(best)) != min(losses.values()):
            return f"`best` leads to {best}, and the validation losses are {losses}"
        left = [path for path in self.folder.rglob(".*") if path.name not in (*OWN_NAMES, *expected.names)]
        return f"temporary files are left: {', '.join(map(str, left))}" if left else None


def is_valid(path: Path) -> bool:
    try:
        return bool(verify(path))
    except (UserError, OSError):
        return False


def read_figures(folder: Path) -> dict[int, list[tuple]]:
    """Return {step: [its FIGURES]} of a run, without damaged lines. More than one line of a step is an error."""
    steps = defaultdict(list)
    for _, record in read_jsonl(folder / "metrics.jsonl")[0]:
        steps[record["step"]].append(tuple(record.get(key) for key in FIGURES))
    return dict(steps)


def read_losses(folder: Path) -> dict[str, float]:
    """Return {name of a checkpoint: its validation loss}, without damaged checkpoints and those without a loss."""
    losses = {}
    for path in checkpoint_folders(folder):
        with suppress(UserError):
            losses[path.name] = read_manifest(path)["val_loss"]
    return {name: loss for name, loss in losses.items() if loss is not None}


def table(survived: Counter[str], lost: Counter[str]) -> str:
    """Return the table of all faults that happened, by kind."""
    rows = [[kind, survived[kind] + lost[kind], survived[kind], lost[kind]] for kind in KINDS]
    rows.append(["all", *(sum(row[i] for row in rows) for i in (1, 2, 3))])
    return tabulate(rows, ["fault", "tried", "survived", "lost"], tablefmt="github")
