"""The kinds of faults, and how they are drawn."""

import os
import random
import signal
from typing import NamedTuple

from tests.crashtest.inject import CAN_FAIL, CHANGE, Operation

SMALL = ["model=tiny", "model.n_layer=2", "train.batch_size=2", "train.block_size=64", "train.tokens_per_step=128"]
SMALL += ["train.max_steps=15", "train.checkpoint_every=3", "train.eval_every=5", "train.eval_batches=1"]
SMALL += ["train.log_every=1", "train.sample_tokens=4", "optim.warmup_steps=3"]
KILL = "kill"  # at any time
KILL_AT = "kill at an operation"
ERRORS = {f"{error} at an operation": error for error in CAN_FAIL}
FULL_LOG = "full log"  # what takes the run's output
CHANGES = [f"{how} in {what}" for what in ("checkpoint", "run", "data") for how in ("flip", "cut")]
REPLACEMENTS = [f"{what} in place of a file" for what in ("FIFO", "folder", "/dev/zero", "broken link")]
REPLACEMENTS += ["mode 000 in place of a file"] if os.geteuid() else []  # root reads every file
DAMAGES = [*CHANGES, *REPLACEMENTS]
MUTE = "mute tracker"  # its server answers nothing after the start
TRACKERS = {"killed tracker": signal.SIGKILL, "stopped tracker": signal.SIGSTOP, MUTE: None}
KINDS = [KILL, KILL_AT, *ERRORS, FULL_LOG, *DAMAGES, *TRACKERS]


class Fault(NamedTuple):
    """A fault of one process that trains. A damage comes after a kill. `seed` draws the rest."""

    kind: str
    seed: int

    @property
    def error(self) -> str | None:
        """The name of the error of the operation that fails; None if the operation kills the process."""
        return "ENOSPC" if self.kind == FULL_LOG else ERRORS.get(self.kind)

    @property
    def operations(self) -> Operation:
        """The kinds of operations of which one fails, or kills the process."""
        if self.kind == FULL_LOG:
            return Operation.OUTPUT
        if self.kind in ERRORS:
            return CAN_FAIL[self.error]
        return CHANGE | Operation.OUTPUT if self.kind in (KILL_AT, *DAMAGES) else Operation(0)

    def share(self) -> float:
        """Return a number in [0, 1): how far the process is when the fault happens."""
        return random.Random(self.seed).random()

    def is_forever(self) -> bool:
        """Return whether every later operation fails, too, as on a full disk. Otherwise one operation fails."""
        return self.kind == FULL_LOG or (self.seed % 2 == 1 and self.kind in ERRORS and ERRORS[self.kind] != "EINTR")

    def describe(self, place: int) -> str:
        """Return what happened at operation `place`."""
        if self.kind == MUTE:
            return self.kind
        if place < 0:
            return f"{self.kind}, after {self.share():.0%} of its time"
        return f"{self.kind}, number {place}{' and all later ones' if self.is_forever() else ''}"

    def place(self, operations: int, is_new: bool) -> int:
        """Return the number of the operation that fails, of so many in an undisturbed run; -1 if none does."""
        if not self.operations:
            return -1
        if self.kind in DAMAGES:  # then most runs have two checkpoints, and some have ended
            return int(operations * (0.5 + 0.6 * self.share()))
        # A resumed run has fewer, and those of its start are its own
        return int(operations * (self.share() if is_new else self.share() ** 2))


NO_FAULT = Fault("", 0)


def draw_faults(rng: random.Random, kind: str, kinds: list[str]) -> list[Fault]:
    """Return a fault of this kind, and in half of the runs one of any of the kinds before it or after it."""
    drawn = [kind, *rng.choices(kinds, k=rng.randint(0, 1))]
    rng.shuffle(drawn)
    return [Fault(kind, rng.getrandbits(32)) for kind in drawn]
