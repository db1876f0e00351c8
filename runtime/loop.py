"""A loop of steps: its size, and in which of them it logs, judges, saves and ends."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.config import check
from runtime.meter import WARMUP, Meter
from runtime.ranks import world_size

# Of a micro-step. Of GPT-2 124M these take an H200 115 ms, and its host 33 to 45 to launch; on a CPU they would take
# 53 GiB of memory, and those 5
TOKENS = {"cuda": 65536, "cpu": 4096}


@dataclass
class TrainConfig:
    batch_size: int | None  # sequences per device and micro-step; None: the most, up to TOKENS, that divide a step
    block_size: int  # tokens per sequence
    tokens_per_step: int  # of one optimizer step over all devices; gradient accumulation follows from it
    max_steps: int | None
    max_minutes: float | None
    log_every: int
    eval_every: int  # 0: never
    eval_batches: int  # of tokens_per_step
    sample_tokens: int  # of text at the end; 0: none
    checkpoint_every: int  # steps; 0: only where the run stops before its end
    keep_checkpoints: int  # the last ones, and the best
    sharded_checkpoints: bool  # of parallel=fsdp: each rank writes its own part
    resume: str | None  # auto | a run's folder | a checkpoint
    stop_after: int | None  # steps of this process, then a checkpoint; the schedule stays
    on_nonfinite: str  # stop | skip

    def __post_init__(self):
        zero = {"eval_every", "sample_tokens", "checkpoint_every"}
        one = {"batch_size", "block_size", "log_every", "eval_batches", "keep_checkpoints", "stop_after"}
        for key in zero | one:
            value, least = getattr(self, key), int(key in one)
            check(value is None or value >= least, f"train.{key}={value}: it must be at least {least}")
        check(self.on_nonfinite in ("stop", "skip"), f"train.on_nonfinite={self.on_nonfinite}: choose stop or skip")
        limits = [limit for limit in (self.max_steps, self.max_minutes) if limit is not None]
        check(bool(limits), "train.max_steps or train.max_minutes must be set, or the run would never end")
        check(all(0 < limit < math.inf for limit in limits), "train.max_steps and train.max_minutes must be above 0")
        if self.batch_size is None:
            sequences = self.tokens_per_step // (self.block_size * world_size())
            most = TOKENS["cuda" if torch.cuda.is_available() else "cpu"] // self.block_size
            sizes = range(1, min(sequences, most) + 1)
            self.batch_size = max([size for size in sizes if sequences % size == 0], default=1)
        micro = self.batch_size * self.block_size * world_size()
        processes = f" x {world_size()} processes" if world_size() > 1 else ""
        below = max(0, self.tokens_per_step // micro * micro)
        check(
            self.tokens_per_step > 0 and below == self.tokens_per_step,
            f"train.tokens_per_step={self.tokens_per_step} does not divide into micro-steps of train.batch_size "
            f"{self.batch_size} x train.block_size {self.block_size}{processes} = {micro} tokens: try "
            f"{f'{below} or ' if below else ''}{below + micro}",
        )


class Due(NamedTuple):
    """What is to be done after a step; all but `logged` are logged as well."""

    logged: bool
    judged: bool
    saved: bool
    ends: bool  # now, for whatever reason
    done: bool  # the run is complete


def due(t: TrainConfig, step: int, made: int, seconds: float, asked: float) -> Due:
    """`made` steps came before this process; the run took `seconds` so far, and a signal may have asked it to stop."""
    done = complete(t, step, seconds)
    ends = bool(done or asked or step - made == t.stop_after)
    logged = step <= made + WARMUP or step % t.log_every == 0
    judged = t.eval_every > 0 and (done or step % t.eval_every == 0)
    saved = (ends and not done) or (t.checkpoint_every > 0 and (done or step % t.checkpoint_every == 0))
    return Due(logged, judged, saved, ends, done)


def last_step(cfg: TrainConfig, step: int, meter: Meter) -> float:
    """The step in which the run will end, for the schedule: max_steps, or where max_minutes lead at this speed."""
    last = cfg.max_steps or math.inf
    seconds = meter.per_step(step)
    if cfg.max_minutes is None or seconds is None:
        return last
    return min(last, step - 1 + math.ceil((60 * cfg.max_minutes - meter.elapsed) / seconds))


def complete(cfg: TrainConfig, step: int, seconds: float) -> bool:
    """Whether a run has no more to do after so many steps, which took so long."""
    return (cfg.max_steps or math.inf) <= step or seconds >= 60 * (cfg.max_minutes or math.inf)
