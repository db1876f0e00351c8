"""Is one choice of kernels faster than another? From rows (result.json) of both, run in turn.

A process that is started anew has other addresses, another clock and another temperature, so its steps are alike and
those of the next one are a little different: what counts is how often each choice was run, not how many steps that
took. With sweep.repeats=2 the jobs run in the order A B B A (Box, Hunter and Hunter 2005: a drift of the machine
cancels), and each run of B is compared with the run of A that was nearest.
"""

import json
import math
import random
import statistics
from collections.abc import Callable
from typing import NamedTuple

DRAWS = 1000
RESOLUTION = 0.005  # of two programs that differ by less, which is faster says nothing of a third machine
# Student's t over the normal's 1.96, of 1, 2, ... degrees of freedom: so much too narrow is a bootstrap of few runs. Of
# two runs more: there are 3 ways to draw, and the 2.5% point is the extreme, 1.41 deviations out and not 1.96
TOO_NARROW = (9.0, 2.20, 1.62, 1.42, 1.31, 1.25, 1.21, 1.18, 1.15, 1.14)
CHOICES = ("kernels", "attn")  # of the config: what is compared; all else has to be alike
APART = ("out_dir", "logger", "sweep")  # and what has no part in the work
APART_IN_TRAIN = ("resume", "stop_after", "keep_checkpoints")
MACHINE = ("device", "driver", "torch", "triton", "git_commit")


class Ratio(NamedTuple):
    """Of speeds, with a 95% interval. `runs` of each were compared; where `gpus`, they were of two GPUs, and the
    interval does not know what sets these apart."""

    value: float
    low: float
    high: float
    runs: int
    gpus: bool = False

    @property
    def verdict(self) -> str:
        if self.low <= 1 <= self.high:
            return "tie"
        return "faster" if self.low > 1 else "slower"

    def __str__(self) -> str:
        high = f"{self.high:.3f}" if self.high < 100 else "over 100"  # of two runs that have nothing in common
        told = f"({self.low:.3f} to {high}{', 1 run' * (self.runs == 1)}{', other GPU' * self.gpus})"
        return f"tie {told}" if self.verdict == "tie" else f"{self.value:.3f}x {told}"


def laps(row: dict) -> list[float]:
    """Seconds of a step, one for each measured interval of a run; none, where it has no speed to show."""
    return (row.get("perf/laps_s") or []) if row["status"] == "ok" else []


def alike(row: dict) -> str:
    """The same for rows of the same command: runs of one choice."""
    return json.dumps(settings(row), sort_keys=True)


def settings(row: dict) -> dict:
    """Of its config what has a part in the work."""
    found = {key: value for key, value in row["config"].items() if key not in APART}
    train = {key: value for key, value in found.get("train", {}).items() if key not in APART_IN_TRAIN}
    return found | {"train": train}


def differences(row: dict, base: dict) -> list[str]:
    """What else sets two rows apart besides their kernels, one line each: they should not be compared."""
    told = _apart("GPUs", row.get("world_size", 1), base.get("world_size", 1))
    mine, theirs = settings(row) | {"env": row["env"]}, settings(base) | {"env": base["env"]}
    for key in sorted((mine | theirs).keys() - {*CHOICES, "env"}):
        told += _apart(key, mine.get(key), theirs.get(key))
    for key in MACHINE:
        told += _apart(key, mine["env"].get(key), theirs["env"].get(key))
    return told


def _apart(key: str, mine, theirs) -> list[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return [line for k in sorted(mine | theirs) for line in _apart(f"{key}.{k}", mine.get(k), theirs.get(k))]
    return [] if mine == theirs else [f"{key}: {mine}, and of the other {theirs}"]


def paired(rows: list[dict], bases: list[dict]) -> list[tuple[dict, dict]]:
    """The first with the first, and so on, of each GPU that both ran on; without one, wherever they ran."""

    def gpu(row: dict) -> str | None:
        return row["env"].get("gpu")

    found = []
    for shared in sorted({gpu(row) for row in rows} & {gpu(base) for base in bases}, key=str):
        found += zip(*([each for each in some if gpu(each) == shared] for some in (rows, bases)), strict=False)
    return found or list(zip(rows, bases, strict=False))


def apart(mine: list[float], theirs: list[float], drawn: Callable = list) -> float:
    """Logarithm of how much longer the laps of the other run are, the median; `drawn` may take a sample of them.

    A lap is compared with that of the same steps: both worked on the same batches. (On an H200 steps of GPT-2 124M in
    bf16 differ by 4%, in all runs alike, and the ratios of two runs' steps by 0.3 to 0.9%: results/h200-same.)
    """
    if len(mine) == len(theirs):
        return statistics.median(drawn([math.log(b / a) for a, b in zip(mine, theirs, strict=True)]))
    return math.log(statistics.median(drawn(theirs)) / statistics.median(drawn(mine)))


def ratio(rows: list[dict], bases: list[dict]) -> Ratio | None:
    """Of their speeds, as paired() has them. None: one has no speed; or there is one run each, of a single lap.

    The interval is a bootstrap's (Efron 1979) of the mean logarithm of the runs' ratios: pairs of runs are drawn, and
    of each its laps. It is widened by what few runs make it too narrow (Hesterberg 2015, arXiv:1411.5279, section 3.3),
    and by RESOLUTION. Of one run each it knows the laps alone, and is widened as of so few of them.
    """
    compared = [(row, base) for row, base in paired(rows, bases) if laps(row) and laps(base)]
    if not compared:
        return None
    pairs, draw, n = [(laps(row), laps(base)) for row, base in compared], random.Random(0), len(compared)

    def again(found: list[float]) -> list[float]:
        return draw.choices(found, k=len(found))

    few = n if n > 1 else min(map(len, pairs[0]))
    if few == 1:
        return None
    value = statistics.fmean(apart(*pair) for pair in pairs)
    drawn = sorted(statistics.fmean(apart(*pair, again) for pair in again(pairs)) for _ in range(DRAWS))
    student = TOO_NARROW[few - 2] if few - 2 < len(TOO_NARROW) else 1 + 1.3 / (few - 1)
    wider = math.sqrt(few / (few - 1)) * student
    low, high = (value + wider * (drawn[int(q * DRAWS)] - value) for q in (0.025, 0.975))
    room = math.log1p(RESOLUTION)
    gpus = any(row["env"].get("gpu") != base["env"].get("gpu") for row, base in compared)
    return Ratio(math.exp(value), math.exp(min(low, value) - room), math.exp(max(high, value) + room), n, gpus)


def payback(row: dict, base: dict) -> float | None:
    """Steps after which a longer start has paid for itself; 0 where it is no longer, None where it never does."""
    if not (laps(row) and laps(base)):
        return None
    later = row["perf/first_step_s"] - base["perf/first_step_s"]
    sooner = (base["perf/step_ms"] - row["perf/step_ms"]) / 1e3
    if later <= 0:
        return 0.0
    return later / sooner if sooner > 0 else None
