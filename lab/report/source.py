"""Read what a report shows: the choices of a sweep or of a device in results/, and rows of benchmarks."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lab.report.choices import Choice, comparable_groups, compare_choices, group_runs, set_qualifiers
from lab.report.describe import newest_choices
from lab.sweep.table import speed
from runtime.config import UserError, check
from runtime.run import read_row

BENCHMARKS = "kernels", "context", "attention"  # the names of their .jsonl files


@dataclass
class ReportSource:
    """A folder's rows."""

    folder: Path
    choices: list[Choice]
    benchmarks: dict[str, list[dict]]  # a name of BENCHMARKS -> its rows, oldest first
    from_results: bool  # True for a folder in results/, False for a sweep's or a run's
    unreadable: list[Path] = field(default_factory=list)  # result.json files that hold no row

    @property
    def measured_choices(self) -> list[Choice]:
        """The choices with a speed, by model and precision, fastest first."""
        choices = [choice for choice in self.choices if choice.times_training and choice.speed]
        return sorted(choices, key=lambda choice: (millions(choice.model), choice.precision, -choice.speed))

    @property
    def largest_group(self) -> list[Choice]:
        """The measured choices of the largest comparable group."""
        return max(comparable_groups(self.measured_choices), key=len)

    @property
    def failed_runs(self) -> Iterator[tuple[Choice, dict]]:
        """The rows without a speed, with their choices."""
        for choice in self.choices:
            if choice.times_training:
                yield from ((choice, row) for row in choice.rows if not speed(row))


def read_source(folder: Path, force: bool = False) -> ReportSource:
    """Read the folder of a sweep, of one run, or of a device in results/, and compare its choices.

    With `force`, choices that differ in more than their kernels are compared too. Raises UserError if the folder has no
    rows of training or of a benchmark, or if a .jsonl file is damaged.
    """
    jobs = {path.parent: read_row(path.parent) for path in job_results(folder)}
    runs, searches = [], []
    for job, row in jobs.items():
        if row and "probe" in row.get("config", {}):
            searches.append(row)
        elif row and "checkpoint" not in row.get("config", {}):  # scripts.generate and scripts.evaluate read one
            runs.append((row, read_losses(job / "metrics.jsonl")))
    collected = folder / "train.jsonl"
    from_results = collected.exists()
    if from_results:
        runs += [(row, read_curve(folder, row)) for row in newest_choices(read_jsonl(collected))]
    choices, benchmarks = group_runs(runs), {name: read_benchmark(folder, name) for name in BENCHMARKS}
    benchmarks["context"] += searches
    check(
        choices or any(benchmarks.values()),
        f"{folder} has no rows of training or of a benchmark: name the folder of a sweep, or one in results/",
    )
    if from_results:
        for choice in choices:  # the README's table of throughput shows the same rows
            choice.times_training = not choice.row["config"]["train"]["eval_every"]
    set_qualifiers(choices)
    compare_choices([choice for choice in choices if choice.times_training and choice.speed], force, from_results)
    unreadable = [job / "result.json" for job, row in jobs.items() if not row]
    return ReportSource(folder, choices, benchmarks, from_results, unreadable)


def job_results(folder: Path) -> list[Path]:
    """Return the result.json files of a sweep's jobs or of a run, in the order of the jobs."""

    def by_number(path: Path) -> list:  # job 10 comes after job 9
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.parent.name)]

    return sorted({*folder.glob("*/result.json"), *folder.glob("result.json")}, key=by_number)


def read_jsonl(path: Path) -> list[dict]:
    """Return the rows of a .jsonl file; empty if there is no file. Raises UserError if a line is damaged."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            rows.append(json.loads(line))
            check(isinstance(rows[-1], dict), "not an object")
        except ValueError:
            raise UserError(
                f"{path}: line {number} is not a row: it was cut short or changed; delete the line"
            ) from None
    return rows


def read_benchmark(folder: Path, name: str) -> list[dict]:
    paths = sorted({*folder.glob(f"*/{name}.jsonl"), *folder.glob(f"{name}.jsonl")})
    return [row for path in paths for row in read_jsonl(path)]


def read_losses(path: Path) -> dict[int, float]:
    """Return step -> training loss from a metrics.jsonl or from a file in curves/."""
    return {line["step"]: line["train/loss"] for line in read_jsonl(path) if line.get("train/loss") is not None}


def read_curve(folder: Path, row: dict) -> dict[int, float]:
    """Return the losses in curves/; empty if their last step is not the row's, because they are of another run."""
    losses = read_losses(folder / "curves" / f"{row['name']}.jsonl")
    return losses if max(losses, default=0) == row.get("steps") else {}


def millions(model: str) -> float:
    """Return 124.0 for "124M"; 0.0 for ""."""
    return float(model.removesuffix("M") or 0)
