"""Compare the speeds of two choices of kernels, by the rows (result.json) of runs that took turns.

A new process has other addresses, another clock rate and another temperature. So two runs differ by more than their
steps suggest, and the number of runs counts, not the number of steps. With sweep.repeats=2 the jobs run in the order
A B B A, in which a drift of the machine cancels (Box, Hunter and Hunter 2005). The n-th run of B is compared with the
n-th run of A.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from model.config import GPTConfig
from model.optim import OptimConfig
from runtime.config import field_defaults

DRAWS = 1000  # samples that the bootstrap draws
RESOLUTION = 0.005  # a difference below 0.5% is a tie: on another machine, the other choice may be faster
# A bootstrap of few runs gives an interval that is too narrow. These factors widen it: Student's t over the normal's
# 1.96, for 1, 2, ... degrees of freedom. Two runs have only 3 different resamples, so the 2.5% quantile is the
# smallest of their means. It is 1.41 standard deviations below the mean instead of 1.96, and the first factor is
# larger by 1.96 / 1.41
WIDENING = (9.0, 2.20, 1.62, 1.42, 1.31, 1.25, 1.21, 1.18, 1.15, 1.14)
COMPARED = ("kernels", "attn", "generate")  # groups of the config that may differ between compared rows
IRRELEVANT = "out_dir", "logger", "sweep", "profile", "raw", "runtime"  # keys that have no effect on the work
IRRELEVANT_IN_TRAIN = ("resume", "stop_after", "keep_checkpoints", "replicate_to", "max_skips")
MACHINE = ("device", "driver", "torch", "triton", "git_commit")


class Ratio(NamedTuple):
    """The ratio of two speeds, with a 95% interval.

    `runs` is the number of runs of each choice. `other_gpu` says that the two choices ran on different GPUs. The
    interval does not include the difference between the GPUs.
    """

    value: float
    low: float
    high: float
    runs: int
    other_gpu: bool = False

    @property
    def verdict(self) -> str:
        if self.low <= 1 <= self.high:
            return "tie"
        return "faster" if self.low > 1 else "slower"

    @property
    def interval(self) -> str:
        """The interval with its notes, such as "0.992 to 1.009, 1 run, other GPU"."""
        high = f"{self.high:.3f}" if self.high < 100 else "over 100"
        notes = [f"{self.low:.3f} to {high}"]
        if self.runs == 1:
            notes.append("1 run")
        if self.other_gpu:
            notes.append("other GPU")
        return ", ".join(notes)

    def __str__(self) -> str:
        value = "tie" if self.verdict == "tie" else f"{self.value:.3f}x"
        return f"{value} ({self.interval})"


def is_generation(row: dict) -> bool:
    """Return whether scripts.generate wrote the row; False for a row without a config."""
    return "max_new_tokens" in row.get("config", {})


def peer_name(row: dict) -> str | None:
    """Return what a row of scripts.peers measures, such as "transformers 5.17.0 + torch.compile"; otherwise None."""
    return row.get("kernels", {}).get("peer")


def sequences(row: dict) -> int:
    """Return how many sequences a generation decodes at once. Old rows have one prompt, and no gen/sequences."""
    return row.get("gen/sequences") or row["config"]["batch"]


def step_seconds(row: dict) -> list[float]:
    """Return the seconds of a step in each timed interval of the run; empty if the row has no valid speed.

    For a generation, they are the seconds in which each sequence gets a token.
    """
    if row["status"] != "ok":
        return []
    return row.get("gen/laps_s" if is_generation(row) else "perf/laps_s") or []


def work_seconds(row: dict) -> list[float]:
    """Return the seconds of equal work in each timed interval: of a training step, or of one generated token."""
    tokens = sequences(row) if is_generation(row) else 1
    return [seconds / tokens for seconds in step_seconds(row)]


def settings(row: dict) -> dict:
    """Return the part of the row's config that has an effect on the work."""
    config = {key: value for key, value in row["config"].items() if key not in IRRELEVANT}
    train = {key: value for key, value in config.get("train", {}).items() if key not in IRRELEVANT_IN_TRAIN}
    if isinstance(config.get("data"), dict):  # the folder of its token shards does not change the data
        config["data"] = {key: value for key, value in config["data"].items() if key != "cache"}
    return config | {"train": train}


def differences(row: dict, base: dict) -> list[str]:
    """Return a line for each difference of two rows besides their kernels. Compare only rows without differences.

    The row of a run that never started names no machine, and matches any machine. A peer never captures its steps, so
    train.cuda_graph is no difference from a peer.
    """
    lines = value_differences("GPUs", row.get("world_size", 1), base.get("world_size", 1))
    config, base_config = settings(row), settings(base)
    for groups in (config, base_config):  # an old row lacks the newer fields
        for name, schema in (("model", GPTConfig), ("optim", OptimConfig)):
            if isinstance(groups.get(name), dict):
                groups[name] = field_defaults(schema) | groups[name]
        if peer_name(row) or peer_name(base):
            groups["train"].pop("cuda_graph", None)
    for key in sorted((config | base_config).keys() - set(COMPARED)):
        lines += value_differences(key, config.get(key), base_config.get(key))
    if "env" in row and "env" in base:
        for key in MACHINE:
            lines += value_differences(key, row["env"].get(key), base["env"].get(key))
    return lines


def value_differences(key: str, value: Any, base: Any) -> list[str]:
    """Return a line for each of differing_values()."""
    return [f"{name}: {now}, baseline {then}" for name, now, then in differing_values(key, value, base)]


def differing_values(key: str, value: Any, base: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, base value) for each difference of two values, which may be dicts of dicts."""
    if isinstance(value, dict) and isinstance(base, dict):
        for k in sorted(value | base):
            yield from differing_values(f"{key}.{k}", value.get(k), base.get(k))
    elif value != base:
        yield key, value, base


def gpu_of(run: dict) -> str | None:
    """Return the GPU of a run; None on a CPU, and if the run ended before it had an environment."""
    return run.get("env", {}).get("gpu")


def pair_runs(rows: list[dict], bases: list[dict]) -> list[tuple[dict, dict]]:
    """Pair the n-th run of one choice with the n-th run of the other, GPU by GPU.

    If no GPU ran both choices, the runs are paired in their order.
    """
    pairs = []
    for gpu in sorted(set(map(gpu_of, rows)) & set(map(gpu_of, bases)), key=str):
        runs, base_runs = ([run for run in each if gpu_of(run) == gpu] for each in (rows, bases))
        pairs += zip(runs, base_runs, strict=False)
    return pairs or list(zip(rows, bases, strict=False))


def timed_intervals(seconds: list[float], base_seconds: list[float]) -> tuple[list[float], ...]:
    """Return what log_ratio() takes for two runs, from their work_seconds().

    Each interval is compared with the baseline's interval of the same steps, because both work on the same batches. (On
    an H200, steps of GPT-2 124M in bf16 differ by 4%, by the same amount in every run. The ratios of two runs' steps
    differ by 0.3 to 0.9% only: results/h200-same.) Runs of different lengths are compared by the medians of their
    seconds.
    """
    if len(seconds) == len(base_seconds):
        return ([math.log(b / a) for a, b in zip(seconds, base_seconds, strict=True)],)
    return base_seconds, seconds


def log_ratio(intervals: tuple[list[float], ...], resample: Callable = list) -> float:
    """Return the logarithm of the ratio of two runs' speeds, from their timed_intervals(): the median over these.

    A bootstrap passes `resample`, which draws a sample of the intervals.
    """
    medians = [statistics.median(resample(values)) for values in intervals]
    return medians[0] if len(medians) == 1 else math.log(medians[0] / medians[1])


def ratio(rows: list[dict], bases: list[dict]) -> Ratio | None:
    """Return the ratio of the speeds of two choices, from their runs in pairs.

    None if a choice has no speed, or if there is one run each with a single timed interval.

    The 95% interval is a bootstrap (Efron 1979) of the mean logarithm of the pairs' ratios: it draws pairs of runs, and
    from each pair its timed intervals. It is then widened by widening() and by RESOLUTION. With one run each, the
    bootstrap draws timed intervals only, and is widened for their number.
    """
    compared = [(row, base) for row, base in pair_runs(rows, bases) if work_seconds(row) and work_seconds(base)]
    if not compared:
        return None
    pairs = [(work_seconds(row), work_seconds(base)) for row, base in compared]
    samples = len(pairs) if len(pairs) > 1 else min(map(len, pairs[0]))
    if samples == 1:
        return None
    generator = random.Random(0)

    def resample(values: list) -> list:
        return generator.choices(values, k=len(values))

    intervals = [timed_intervals(*pair) for pair in pairs]
    value = statistics.fmean(map(log_ratio, intervals))
    draws = sorted(statistics.fmean([log_ratio(each, resample) for each in resample(intervals)]) for _ in range(DRAWS))
    low, high = (value + widening(samples) * (draws[int(quantile * DRAWS)] - value) for quantile in (0.025, 0.975))
    margin = math.log1p(RESOLUTION)
    return Ratio(
        value=math.exp(value),
        low=math.exp(min(low, value) - margin),
        high=math.exp(max(high, value) + margin),
        runs=len(pairs),
        other_gpu=any(gpu_of(row) != gpu_of(base) for row, base in compared),
    )


def widening(samples: int) -> float:
    """Return the factor by which to widen the bootstrap's interval of the mean of n = `samples` >= 2 values.

    The interval of few values is too narrow: its variance lacks the factor n / (n - 1), and its quantiles are the
    normal distribution's instead of Student's t (Hesterberg 2015, arXiv:1411.5279, section 3.3).
    """
    degrees = samples - 1
    student = WIDENING[degrees - 1] if degrees <= len(WIDENING) else 1 + 1.3 / degrees
    return math.sqrt(samples / degrees) * student


def payback_steps(row: dict, base: dict) -> float | None:
    """Return the number of steps after which faster steps make up for a longer first step, as of torch.compile.

    0 if the first step is not longer; None if the steps are not faster, or if a row lacks these figures.
    """
    if None in [each.get(key) for key in ("perf/first_step_s", "perf/step_ms") for each in (row, base)]:
        return None
    extra_start = row["perf/first_step_s"] - base["perf/first_step_s"]
    saved_per_step = (base["perf/step_ms"] - row["perf/step_ms"]) / 1e3
    if extra_start <= 0:
        return 0.0
    return extra_start / saved_per_step if saved_per_step > 0 else None
