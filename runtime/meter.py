"""Throughput, measured with the wall clock between two synchronisations of the device.

The host runs ahead of the device, so a time is valid only between two synchronisations. The training loop synchronises
after logged steps only. The steps between two logged steps are an interval. A sample is the mean time of the steps of
one interval. The first WARMUP steps (compilation, autotuning, allocator growth) and evaluations are in no sample.
"""

import statistics
import time

import torch

from runtime.compiling import cache_state, graph_breaks, graphs
from runtime.device import Ceiling, peak_memory
from runtime.power import PowerMeter
from runtime.ranks import Ranks
from runtime.timing import synchronize

WARMUP = 3  # steps
MAX_SAMPLES = 200  # the most samples that a row holds


class Meter:
    """Time, memory and compilations of the steps of this process. The clock starts when the Meter is made.

    Before this process, a resumed run had made `steps_before` steps in `seconds_before` seconds.
    """

    def __init__(
        self,
        device: torch.device,
        tokens_per_step: int,
        ceiling: Ceiling,
        ranks: Ranks | None = None,
        steps_before: int = 0,
        seconds_before: float = 0.0,
    ):
        self.device, self.tokens_per_step, self.ceiling = device, tokens_per_step, ceiling
        self.ranks, self.steps_before, self.seconds_before = ranks or Ranks(), steps_before, seconds_before
        self.step_seconds: list[float] = []  # the samples: the mean seconds of a step, one for each interval
        self.step_data_waits: list[float] = []  # the part of each sample in which the host waited for data
        self.measured_steps = 0  # of the samples
        self.power = PowerMeter(device)
        self.recompiles = 0  # graphs compiled in training steps after the first
        self.first_step_s = self.warmup_s = None
        self.start = time.perf_counter()
        self.start_interval(steps_before)

    @property
    def elapsed(self) -> float:
        """The seconds of the whole run so far."""
        return self.seconds_before + time.perf_counter() - self.start

    def is_warmup(self, step: int) -> bool:
        """Whether `step` is one of the first WARMUP steps of this process."""
        return step <= self.steps_before + WARMUP

    def seconds_per_step(self, step: int) -> float | None:
        """Return the mean seconds of a step so far, while `step` runs. None if there is no figure yet.

        It leaves out the first step of this process. During the warm-up it is the mean of the earlier processes.
        """
        if self.is_warmup(step):
            return self.seconds_before / self.steps_before if self.steps_before else None
        steps = step - 1 - self.steps_before - 1  # complete steps of this process, without the first
        return (self.elapsed - self.seconds_before - self.first_step_s) / steps

    def start_interval(self, step: int) -> None:
        """Start an interval after `step`. The time between the end of the last interval and now is in no sample."""
        self.power.start()
        self.interval_start = step, time.perf_counter(), graphs()
        self.data_wait = 0.0  # seconds; the loop adds to it

    def end_interval(self, step: int) -> dict[str, float | None]:
        """Synchronise, end the interval after `step`, and start the next one. Returns the figures of this interval."""
        synchronize(self.device)
        start_step, start_time, start_graphs = self.interval_start
        steps = step - start_step
        seconds, data_wait = (time.perf_counter() - start_time) / steps, self.data_wait / steps
        if start_step == self.steps_before:
            self.first_step_s = seconds
        else:
            self.recompiles += graphs() - start_graphs
        if step == self.steps_before + WARMUP:
            self.warmup_s = self.elapsed - self.seconds_before
        if start_step >= self.steps_before + WARMUP:
            self.step_seconds.append(seconds)
            self.step_data_waits.append(data_wait)
            self.measured_steps += steps
            self.power.stop()
        self.start_interval(step)
        return {
            **self.ceiling.figures(self.tokens_per_step / seconds),
            "perf/step_ms": 1e3 * seconds,
            "perf/data_wait_ms": 1e3 * data_wait,
            **peak_memory(self.device, self.ranks),
        }

    def result(self) -> dict[str, float | None]:
        """Return the row's figures: medians over the intervals. Throughput is None if the run ended in its warm-up."""
        start = {"perf/first_step_s": self.first_step_s, "perf/warmup_s": self.warmup_s}
        if not self.step_seconds:
            return {**self.ceiling.figures(None), **start}
        p20, median, p80 = quantiles(self.step_seconds)
        return {
            **self.ceiling.figures(self.tokens_per_step / median),
            "perf/tokens_per_sec/p20": self.tokens_per_step / p80,
            "perf/tokens_per_sec/p80": self.tokens_per_step / p20,
            "perf/step_ms": 1e3 * median,
            "perf/data_wait_ms": 1e3 * statistics.median(self.step_data_waits),
            **start,
            "perf/compile_s": max(0.0, self.first_step_s - median),
            "perf/recompiles": self.recompiles,
            "perf/graph_breaks": graph_breaks(),
            "perf/cache": cache_state(),
            "perf/laps_s": self.step_seconds[:MAX_SAMPLES],
            "perf/samples": len(self.step_seconds),
            **self.power.figures(self.measured_steps * self.tokens_per_step, self.ranks),
        }


def quantiles(samples: list[float]) -> tuple[float, float, float]:
    """Return the 20% quantile, the median and the 80% quantile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    p20, *_, p80 = statistics.quantiles(samples, n=5, method="inclusive")
    return p20, statistics.median(samples), p80
