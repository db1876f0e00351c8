"""Throughput, from the wall clock between two moments at which the device was idle.

The host runs ahead of the device, so only the time between synchronisations means anything; the loop synchronises on
logged steps alone, and a sample is the mean step of such an interval. The first WARMUP steps (compilation, autotuning,
allocator growth) and evaluations are in no sample.
"""

import statistics
import time

import torch

from runtime.compiling import breaks, cache, graphs
from runtime.device import Ceiling, memory
from runtime.ranks import Ranks
from runtime.timing import synchronize

WARMUP = 3  # steps
LAPS = 200  # that a row keeps


class Meter:
    """Time, memory and compilations of a loop of steps that follow `first` others; the clock starts here.

    `before` are the seconds that an earlier process spent on the run: `elapsed` counts them, and nothing else does.
    """

    def __init__(
        self,
        device: torch.device,
        tokens_per_step: int,
        ceiling: Ceiling,
        ranks: Ranks | None = None,
        first: int = 0,
        before: float = 0.0,
    ):
        self.device, self.tokens_per_step, self.ceiling = device, tokens_per_step, ceiling
        self.ranks, self.first, self.before = ranks or Ranks(), first, before
        self.seconds: list[float] = []  # a step, one an interval
        self.waits: list[float] = []  # for data, likewise
        self.recompiles = 0  # graphs compiled in training steps after the first
        self.first_step_s = self.warmup_s = None
        self.start = time.perf_counter()
        self.restart(first)

    @property
    def elapsed(self) -> float:
        return self.before + time.perf_counter() - self.start

    def warming(self, step: int) -> bool:
        """Whether `step` is one of the process's first, which are in no sample."""
        return step <= self.first + WARMUP

    def per_step(self, step: int) -> float | None:
        """Seconds that a step took so far, `step` being under way: the mean without this process's first. While that
        warms up, the mean of an earlier process, if there was one."""
        if self.warming(step):
            return self.before / self.first if self.first else None
        return (self.elapsed - self.before - self.first_step_s) / (step - self.first - 2)

    def restart(self, step: int) -> None:
        """`step` steps are done, and what passed since the last lap was not training."""
        self.mark, self.waited = (step, time.perf_counter(), graphs()), 0.0

    def lap(self, step: int) -> dict[str, float | None]:
        """Synchronise: `step` steps are done. The figures since the last lap or restart."""
        synchronize(self.device)
        since, then, compiled = self.mark
        seconds, waited = (time.perf_counter() - then) / (step - since), self.waited / (step - since)
        if since == self.first:
            self.first_step_s = seconds
        else:
            self.recompiles += graphs() - compiled
        if step == self.first + WARMUP:
            self.warmup_s = self.elapsed - self.before
        if since >= self.first + WARMUP:
            self.seconds.append(seconds)
            self.waits.append(waited)
        self.restart(step)
        return {
            **self.ceiling.figures(self.tokens_per_step / seconds),
            "perf/step_ms": 1e3 * seconds,
            "perf/data_wait_ms": 1e3 * waited,
            **memory(self.device, self.ranks),
        }

    def result(self) -> dict[str, float | None]:
        """The row's figures: medians over the laps; throughput is null where the run ended in its warm-up."""
        start = {"perf/first_step_s": self.first_step_s, "perf/warmup_s": self.warmup_s}
        if not self.seconds:
            return {**self.ceiling.figures(None), **start}
        p20, median, p80 = quantiles(self.seconds)
        return {
            **self.ceiling.figures(self.tokens_per_step / median),
            "perf/tokens_per_sec/p20": self.tokens_per_step / p80,
            "perf/tokens_per_sec/p80": self.tokens_per_step / p20,
            "perf/step_ms": 1e3 * median,
            "perf/data_wait_ms": 1e3 * statistics.median(self.waits),
            **start,
            "perf/compile_s": max(0.0, self.first_step_s - median),
            "perf/recompiles": self.recompiles,
            "perf/graph_breaks": breaks(),
            "perf/cache": cache(),
            "perf/laps_s": self.seconds[:LAPS],
            "perf/samples": len(self.seconds),
        }


def quantiles(samples: list[float]) -> tuple[float, float, float]:
    """p20, median, p80."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    p20, *_, p80 = statistics.quantiles(samples, n=5, method="inclusive")
    return p20, statistics.median(samples), p80
