"""One run of train.py in a worker: the judge chooses windows of steps, and measures them by its own clock.

The worker sends the losses of each window, and its state after some windows. It learns the length and the batches of a
window when the window begins, and does not know which states will be compared.
"""

import random
import statistics
import time
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from common.files import check_regular
from common.terminal import override
from lab.judge.sandbox import Ended, Sandbox
from lab.proof.witness import FIGURES, sum_of_bits
from model.config import GPTConfig
from runtime.meter import WARMUP, quantiles

WINDOW = 2, 4  # the fewest and the most steps of a window
SEGMENT = 8, 15  # the fewest and about the most steps between two states
START_SECONDS = 600.0  # the longest wait for an answer. A run compiles kernels at its start and in its first window
LARGEST_LOSS = 1e9  # the sum of the squares of larger numbers could overflow
PROMPT, GENERATED = 32, 5  # tokens of each sequence: before the generation, and in it
ALL_STEPS, SEGMENTS, LONG_WINDOW = 200, 6, 50  # a longer run has about 6 segments, and windows of 25 to 50 steps


class Plan(NamedTuple):
    """The lengths of a run's windows in steps, and the steps after which the judge asks for the state.

    `shifts` has for each window the number of samples by which the order of the data moves. Only the judge knows the
    plan, and both sides of a comparison get the same one.
    """

    windows: list[int]
    states: list[int]
    shifts: list[int]

    @property
    def starts(self) -> list[int]:
        """For each window, the number of steps before it."""
        return [0, *accumulate(self.windows[:-1])]

    @property
    def loader_shifts(self) -> list[tuple[int, int]]:
        """Loader.shifts of the run: for each window (its first step, samples)."""
        return [(start + 1, shift) for start, shift in zip(self.starts, self.shifts, strict=True)]

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The segments that can be repeated, each as the steps of its two states. The first segment starts at 0."""
        pairs = zip([0, *self.states[:-1]], self.states, strict=True)
        return [(first, last) for first, last in pairs if last - first <= SEGMENT[1] + WINDOW[1]]


def draw_plan(steps: int, source: random.Random) -> Plan:
    """Draw windows that cover `steps` steps. The first window has the warm-up, which no figure includes.

    In a run of at most ALL_STEPS the segments cover all steps. A longer one has about SEGMENTS at random places, the
    first of them at its start.
    """
    windows, states = [min(steps, WARMUP + 2)], []
    first, length = 0, source.randint(*SEGMENT)  # of the open segment; first is None between two segments
    while (step := sum(windows)) < steps:
        if first is not None and step - first >= length:
            states.append(step)
            first, length = step if steps <= ALL_STEPS else None, source.randint(*SEGMENT)
        elif first is None and source.random() < SEGMENTS * LONG_WINDOW / steps:
            states.append(step)
            first = step
        size = source.randint(*WINDOW) if first is not None else source.randint(LONG_WINDOW // 2, LONG_WINDOW)
        windows.append(min(steps - step, size))
    return Plan(windows, [*states, steps], [source.randrange(2**31) for _ in windows])


@dataclass
class Arm:
    """The evidence of one run. `status` is "ok", "failed: why" or "wrong: why"."""

    status: str = "ok"
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each window
    allocated: list[int] = field(default_factory=list)  # bytes after each window, as the worker says
    val_loss: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)  # what the worker says of itself
    no_generation: str | None = None  # why there are no logits
    folder: Path | None = None

    def state(self, step: int) -> Path:
        return self.folder / f"state-{step}"

    @property
    def logits(self) -> Path:
        return self.folder / "logits"


def run_arm(
    words: list[str],
    folder: Path,
    inside: Path,
    plan: Plan,
    kept: set[int],
    prompts: tuple[Tensor, Tensor, Tensor] | None = None,
    shows_output: bool = False,
) -> Arm:
    """Run train.py with the arguments `words` in a worker.

    The new folder `folder` gets the states after the steps `kept`. The judge asks for all states of the plan, and
    deletes the others. `inside` is the worker's folder. Runs of the same backend share it, because it has their compile
    caches. `prompts` are the arguments of generation_logits(). The output of the run goes into the worker's log, or
    with `shows_output` to the terminal.
    """
    arm, steps, inside = Arm(folder=folder), 0, inside.resolve()
    program = str(inside / "repo" / "train.py")
    folder.mkdir(parents=True)
    with Sandbox([program, *words, override("out_dir", inside / "run")], inside, START_SECONDS, shows_output) as worker:
        try:
            worker.receive()
            for count, shift in zip(plan.windows, plan.shifts, strict=True):
                start = time.perf_counter()
                worker.send(("run", count, shift))
                answer = worker.receive()
                arm.seconds.append(time.perf_counter() - start)
                arm.losses += read_losses(answer, count)
                allocated = answer.get("allocated")
                arm.allocated.append(allocated if isinstance(allocated, int) else 0)
                steps += count
                if answer.get("refused"):
                    raise Ended(f"it refused {answer['refused']} steps, whose loss or gradient was not finite")
                if steps in plan.states:
                    worker.send(("state", f"state-{steps}"))
                    worker.receive()
                    if steps in kept:  # a copy, because the worker may still write to its file
                        worker.copy_file(f"state-{steps}", arm.state(steps))
                        if answer.get("weights") != checksum(arm.state(steps)):
                            arm.status = f"wrong: its weights changed after the window that ends with step {steps}"
                            return arm
                    (inside / f"state-{steps}").unlink(missing_ok=True)
            worker.send(("run", None))
            answer = worker.receive()
            if answer.get("replaced"):
                arm.status = f"wrong: it replaced {', '.join(map(str, answer['replaced']))}"
            elif answer.get("changed"):
                arm.status = f"wrong: it changes the process around it: {', '.join(map(str, answer['changed']))}"
            arm.val_loss, arm.figures = answer.get("val_loss"), dict(answer.get("figures") or {})
            if prompts:
                worker.send(("logits", "logits", *prompts))
                arm.no_generation = worker.receive().get("unavailable")
                if not arm.no_generation:
                    worker.copy_file("logits", arm.logits)
        except (Ended, OSError, TypeError, ValueError) as error:
            arm.status = f"failed: {error}"
        if changed := worker.changed_files():
            arm.status = f"wrong: it changed files of the repo: {', '.join(changed[:5])}"
    return arm


def checksum(path: Path) -> str:
    """Return the sum_of_bits() of the weights in a state that a worker sent. Raises Ended if they cannot be read."""
    try:
        state = read_state(path)
        return str(int(sum_of_bits(tensor for name, tensor in state.items() if name.startswith("model/"))))
    except Exception as error:  # safetensors and PyTorch raise several classes for a damaged file
        raise Ended(f"it sent no state: {error}") from None


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file of any size: the state of GPT-2 124M has 1.5 GB."""
    check_regular(path)
    return load_file(path)


def read_losses(answer: dict, count: int) -> list[float]:
    """Return the losses of a window. Raises Ended if they are not `count` floats of at most LARGEST_LOSS, or NaN."""
    losses = answer.get("losses")
    if not isinstance(losses, list) or len(losses) != count or not all(isinstance(loss, float) for loss in losses):
        raise Ended(f"it sent no {count} losses")
    if any(abs(loss) > LARGEST_LOSS for loss in losses):
        raise Ended(f"it sent a loss of more than {LARGEST_LOSS:g}")
    return losses


def arm_row(arm: Arm, plan: Plan, facts: dict, tokens_per_step: int) -> dict:
    """Return the row of a run, in train.py's form, from the judge's measurements and `facts`."""
    row = {**facts, "status": arm.status, "steps": len(arm.losses)}
    if arm.status != "ok":
        return row
    # No figure includes the first window, which compiles, or a window that the replay could not contain
    windows = list(zip(plan.starts, plan.windows, arm.seconds, strict=True))[1:]
    laps = [
        seconds / count
        for start, count, seconds in windows
        if any(first <= start and start + count <= last for first, last in plan.segments)
    ]
    for key in FIGURES:  # the worker's word counts for these keys only
        value = arm.figures.get(key)
        if key != "kernels":
            row[key] = value if isinstance(value, float) else None
        elif isinstance(value, dict):
            row[key] = value
    row |= {"train/loss": arm.losses[-1], "val/loss": arm.val_loss, "losses": arm.losses}
    if laps:
        p20, median, p80 = quantiles(laps)
        row |= {"perf/laps_s": laps, "perf/step_ms": 1e3 * median, "perf/tokens_per_sec": tokens_per_step / median}
        row |= {"perf/tokens_per_sec/p20": tokens_per_step / p80, "perf/tokens_per_sec/p80": tokens_per_step / p20}
    return row


def growing_memory(arm: Arm) -> float | None:
    """Return the median bytes by which the worker's allocated memory grows in a window.

    None if it does not grow in every window after the first.
    """
    later = arm.allocated[1:]
    growth = [after - before for before, after in pairwise(later)]
    return statistics.median(growth) if len(growth) > 2 and min(growth) > 0 else None


def draw_prompts(model: GPTConfig, source: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Return random prompts (4, T), their lengths (4,), and the tokens (4, GENERATED) that follow them, all int64."""
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    length = min(PROMPT, model.block_size // 2)
    idx = torch.randint(model.vocab_size, (4, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (4,), generator=generator)
    return idx, lengths, torch.randint(model.vocab_size, (4, GENERATED), generator=generator)
