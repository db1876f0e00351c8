"""The size of a training step, and the schedule of a run: in which steps it logs, evaluates, saves and ends."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.config import check
from runtime.meter import WARMUP, Meter
from runtime.ranks import count_batch_ranks, world_size

SHORT = 1024  # tokens of a sequence. A preset of today has up to 131,072 positions, more than a step has tokens
# The most tokens of a micro-step by default. On an H200, 65,536 tokens of GPT-2 124M take 115 ms, and the host takes 33
# to 45 ms to launch their kernels. On a CPU 65,536 tokens would take 53 GiB of memory, and 4,096 tokens take 5 GiB
DEFAULT_TOKENS = {"cuda": 65536, "cpu": 4096}
OVERFIT_LOSS = 0.1  # nats a token: a model that knows its only batch by heart is below it


@dataclass
class TrainConfig:
    """The keys of the config group `train`."""

    batch_size: int | None  # sequences per device and micro-step; None: default_batch_size()
    block_size: int  # tokens per sequence
    tokens_per_step: int  # tokens of an optimizer step over all devices; it decides the number of micro-steps
    max_steps: int | None
    max_minutes: float | None
    log_every: int
    eval_every: int  # 0: never
    eval_batches: int  # batches of an evaluation, each of tokens_per_step tokens
    sample_tokens: int  # tokens of text to generate at the end; 0: none
    checkpoint_every: int  # steps; 0: only if the run stops before its end
    keep_checkpoints: int  # how many of the newest to keep; the best one is kept too
    sharded_checkpoints: bool  # with parallel=fsdp or zero2: each rank writes its own part
    resume: str | None  # auto | a run's folder | a checkpoint
    stop_after: int | None  # steps after which this process writes a checkpoint and ends; the schedule does not change
    on_nonfinite: str  # stop | skip
    cuda_graph: bool | None  # replay steps from a CUDA graph; None: where it is possible
    overfit: bool  # every step trains on the batch of step 1
    max_skips: int  # with on_nonfinite=skip, the run fails after so many refused steps in a row
    spike_factor: float | None  # keep the batch of a loss beyond this multiple of the recent median
    replicate_to: str | None  # a folder for a copy of the newest checkpoint

    def __post_init__(self):
        may_be_zero = {"eval_every", "sample_tokens", "checkpoint_every"}
        at_least_one = {"batch_size", "block_size", "log_every", "eval_batches", "keep_checkpoints", "stop_after"}
        at_least_one |= {"max_skips"}
        for key in may_be_zero | at_least_one:
            value = getattr(self, key)
            least = 1 if key in at_least_one else 0
            check(value is None or value >= least, f"train.{key}={value}: it must be at least {least}")
        check(self.on_nonfinite in ("stop", "skip"), f"train.on_nonfinite={self.on_nonfinite}: choose stop or skip")
        is_factor = self.spike_factor is None or 1 < self.spike_factor < math.inf
        check(is_factor, f"train.spike_factor={self.spike_factor}: it must be above 1, or null")
        limits = [limit for limit in (self.max_steps, self.max_minutes) if limit is not None]
        check(bool(limits), "train.max_steps or train.max_minutes must be set, or the run would never end")
        check(all(0 < limit < math.inf for limit in limits), "train.max_steps and train.max_minutes must be above 0")

    def divide_step(self, parallel: str) -> None:
        """Choose the batch size if it is None. Raises UserError if the step does not divide into micro-steps."""
        ranks = count_batch_ranks(parallel, world_size())
        if self.batch_size is None:
            self.batch_size = self.default_batch_size(ranks)
        micro_step = self.batch_size * self.block_size * ranks
        processes = f" x {ranks} processes" if ranks > 1 else ""
        below = max(0, self.tokens_per_step // micro_step * micro_step)
        suggestion = f"{below} or {below + micro_step}" if below else str(micro_step)
        if self.block_size > SHORT and self.tokens_per_step % (self.batch_size * SHORT * ranks) == 0:
            suggestion = f"train.block_size={SHORT}, or steps of {suggestion} tokens"
        elif not below:
            suggestion += ", or a smaller train.block_size"
        check(
            self.tokens_per_step > 0 and below == self.tokens_per_step,
            f"train.tokens_per_step={self.tokens_per_step} does not divide into micro-steps of train.batch_size "
            f"{self.batch_size} x train.block_size {self.block_size}{processes} = {micro_step} tokens: try "
            f"{suggestion}",
        )

    def default_batch_size(self, batch_ranks: int) -> int:
        """Return the largest number of sequences within DEFAULT_TOKENS that divides a step of `batch_ranks` ranks."""
        sequences = self.tokens_per_step // (self.block_size * batch_ranks)
        tokens = DEFAULT_TOKENS["cuda" if torch.cuda.is_available() else "cpu"] * world_size() // batch_ranks
        most = tokens // self.block_size
        divisors = [size for size in range(1, min(sequences, most) + 1) if sequences % size == 0]
        return max(divisors, default=1)

    @property
    def eval_samples(self) -> int:
        """The number of sequences of one evaluation."""
        return self.eval_batches * self.tokens_per_step // self.block_size


@dataclass
class RuntimeConfig:
    """The keys of the config group `runtime`."""

    hang_minutes: float | None  # a job without progress ends after so many minutes; None: never
    requeue: bool  # after SIGUSR1, put the SLURM job back into the queue

    def __post_init__(self):
        limit = self.hang_minutes
        check(limit is None or limit > 0, f"runtime.hang_minutes={limit}: it must be above 0, or null")


class Due(NamedTuple):
    """What is due after a step. A step with anything due is also logged."""

    log: bool
    evaluate: bool
    save: bool
    end: bool  # the process ends, for any reason
    finished: bool  # the run is complete
    interrupted: bool  # a signal ends it before it is complete

    @property
    def nothing(self) -> bool:
        return not (self.log or self.evaluate or self.save or self.end)


def due(t: TrainConfig, step: int, steps_before: int, seconds: float, stop_requested: float) -> Due:
    """Return what is due after `step`, `seconds` after a run's start. Earlier processes made `steps_before` steps."""
    finished = is_finished(t, step, seconds)
    end = bool(finished or stop_requested or step - steps_before == t.stop_after)
    log = step <= steps_before + WARMUP or step % t.log_every == 0
    evaluate = t.eval_every > 0 and (finished or step % t.eval_every == 0)
    save = (end and not finished) or (t.checkpoint_every > 0 and (finished or step % t.checkpoint_every == 0))
    return Due(log, evaluate, save, end, finished, bool(stop_requested) and not finished)


def predict_last_step(t: TrainConfig, step: int, meter: Meter) -> float:
    """Return a run's last step, by max_steps, or by max_minutes at the speed so far; infinity if it is unknown."""
    last = t.max_steps or math.inf
    seconds = meter.seconds_per_step(step)
    if t.max_minutes is None or seconds is None:
        return last
    return min(last, step - 1 + math.ceil((60 * t.max_minutes - meter.elapsed) / seconds))


def is_finished(t: TrainConfig, step: int, seconds: float) -> bool:
    """Whether a run is complete after `step` steps, which took `seconds`."""
    return (t.max_steps or math.inf) <= step or seconds >= 60 * (t.max_minutes or math.inf)


def check_overfit(t: TrainConfig, due: Due, step: int, loss: float) -> None:
    """At the end of a run with train.overfit, print that the last loss is near zero, or raise UserError."""
    if not (t.overfit and due.finished):
        return
    check(
        loss < OVERFIT_LOSS,
        f"train.overfit=true: after {step} steps the loss of the only batch is {loss:.3g}, not below {OVERFIT_LOSS}; "
        "take more steps or fewer tokens (train.max_steps, train.tokens_per_step), and no dropout; if the loss stays, "
        "look for a wrong kernel: python -m scripts.doctor",
    )
    print(f"overfit  the loss of the only batch is {loss:.3g}, below {OVERFIT_LOSS}")
