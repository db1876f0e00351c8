"""Disturb training runs at random, and judge whether they went on as if nothing had happened.

A fault kills the process, fills its disk, or kills it and damages a file of the run. Then the run resumes. It survives
if it ends without an error, and its FIGURES are bit-equal with those of an undisturbed run.
"""

import random
import resource
import signal
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from lab.rows import read_jsonl
from runtime.checkpoint import checkpoint_folders

SMALL = ["model=tiny", "model.n_layer=2", "train.batch_size=2", "train.block_size=64", "train.tokens_per_step=128"]
SMALL += ["train.max_steps=15", "train.checkpoint_every=3", "train.eval_every=5", "train.eval_batches=1"]
SMALL += ["train.log_every=1", "train.sample_tokens=0", "optim.warmup_steps=3"]
KILL = "kill"
KILL_BETWEEN_FILES = "kill in a save"
KILL_IN_FILE = "kill in a file's write"
FULL_DISK = "full disk"
DAMAGES = [f"{how} in {what}" for what in ("checkpoint", "metrics.jsonl", "config.yaml") for how in ("flip", "cut")]
KINDS = [KILL, KILL_BETWEEN_FILES, KILL_IN_FILE, FULL_DISK, *DAMAGES]
MOST_OPERATIONS = 36  # on files in a save; without the deletion of old checkpoints and a new `best`: 19
FIGURES = "train/loss", "train/grad_norm", "val/loss"


class Fault(NamedTuple):
    """A kill happens at any time. Every other kind begins with the save of step `step`; `seed` draws the rest."""

    kind: str
    step: int
    seed: int

    def __str__(self) -> str:
        moment = f"after {self.share():.0%} of its time" if self.kind == KILL else f"step {self.step}"
        return f"{self.kind}, {moment}"

    def share(self) -> float:
        """Return a number in [0, 1): how far the run, the save or the file is when the fault happens."""
        return random.Random(self.seed).random()


def draw_faults(rng: random.Random, kind: str, saves: list[int]) -> list[Fault]:
    """Return a fault of this kind and, in half of the runs, one of any kind that disturbs the resumed run."""
    kinds = [kind, *rng.choices(KINDS, k=rng.randint(0, 1))]
    # Before a damage, two checkpoints must be complete
    return [Fault(kind, rng.choice(saves[2:] if kind in DAMAGES else saves), rng.getrandbits(32)) for kind in kinds]


def arm(fault: Fault, folder: Path, largest: int) -> None:
    """Let the fault happen in this process, which trains in `folder`. The parent process makes a fault of kind KILL.

    `largest` is the size of the largest file of a checkpoint.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if fault.kind == KILL_IN_FILE:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it. It ends a process at the limit of a file
    first_operation = str(folder / "checkpoints" / f".step-{fault.step:06d}")
    remaining = int(MOST_OPERATIONS * fault.share()) if fault.kind == KILL_BETWEEN_FILES else 0
    thread: int | None = None  # the thread that saves, once this save has begun

    def watch(event: str, arguments: tuple) -> None:
        nonlocal remaining, thread
        if event == "os.mkdir" and thread is None and str(arguments[0]) == first_operation:
            thread = threading.get_ident()
            if fault.kind in (FULL_DISK, KILL_IN_FILE):
                limit = int(largest * fault.share())
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        is_operation = thread == threading.get_ident() and (event == "open" or event.startswith("os."))
        if is_operation and fault.kind not in (FULL_DISK, KILL_IN_FILE):
            remaining -= 1
            if remaining < 0:
                signal.raise_signal(signal.SIGKILL)

    if fault.kind != KILL:
        sys.addaudithook(watch)


class Disturbed:
    """A run in `folder` that faults disturb. `expected` is read_figures() of an undisturbed run."""

    def __init__(self, folder: Path, expected: dict[int, list[tuple]]):
        self.folder, self.expected = folder, expected
        self.gone: set[int] = set()  # the steps whose lines in metrics.jsonl were damaged

    def damage(self, fault: Fault) -> str | None:
        """Flip a bit of a file, or cut it. Returns what was done; None if there is no file to damage."""
        how, what = fault.kind.split(" in ")
        path, rng = self.folder / what, random.Random(fault.seed)
        if what == "checkpoint":
            checkpoints = checkpoint_folders(self.folder / "checkpoints")
            if len(checkpoints) < 2:
                return None
            path = rng.choice(sorted(file for file in checkpoints[0].rglob("*") if file.is_file()))
        steps_before = read_figures(self.folder).keys()
        before = path.read_bytes() if path.exists() else b""
        if not before:
            return None
        place, bit = rng.randrange(len(before)), rng.randrange(8)
        after = bytearray(before[:place] if how == "cut" else before)
        if how == "flip":
            after[place] ^= 1 << bit
        path.write_bytes(after)
        if what == "metrics.jsonl":
            self.gone |= steps_before - read_figures(self.folder).keys()
        return f"{how} in {path.relative_to(self.folder)}, byte {place:,}"

    def find_loss(self) -> str | None:
        """Return how the first step differs from the undisturbed run's; None if all steps are equal.

        The lines of metrics.jsonl that were damaged may be missing.
        """
        found = read_figures(self.folder)
        for step in sorted({*self.expected, *found}):
            if found.get(step) != self.expected.get(step) and not (step in self.gone and step not in found):
                return f"step {step} has {found.get(step)} instead of {self.expected.get(step)}"
        return None


def read_figures(folder: Path) -> dict[int, list[tuple]]:
    """Return {step: [its FIGURES]} of a run, without damaged lines. More than one line of a step is an error."""
    steps = defaultdict(list)
    for _, record in read_jsonl(folder / "metrics.jsonl")[0]:
        steps[record["step"]].append(tuple(record.get(key) for key in FIGURES))
    return dict(steps)


def table(survived: Counter[str], lost: Counter[str]) -> str:
    """Return the table of all faults that happened, by kind."""
    rows = [[kind, survived[kind] + lost[kind], survived[kind], lost[kind]] for kind in KINDS]
    rows.append(["all", *(sum(row[i] for row in rows) for i in (1, 2, 3))])
    return tabulate(rows, ["fault", "tried", "survived", "lost"], tablefmt="github")
