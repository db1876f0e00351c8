"""Read what a report shows: the choices of a sweep or of a device in results/, and rows of benchmarks.

A choice is of training or of generation. Rows of scripts.evaluate are left out.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lab.report.choices import Choice, compare_choices, group_runs, mark_lowest_loss, set_qualifiers
from lab.report.describe import newest_choices, newest_searches, prompt_tokens
from lab.report.user_command import clone_command
from lab.rerun import rerun_command
from lab.rows import read_jsonl, read_run
from lab.sweep.compare import is_generation, sequences
from runtime.config import check

BENCHMARKS = "kernels", "context", "attention", "judge"  # the names of their .jsonl files
SUFFIXES = "-rungs", "-today", "-fp8"  # of a device's folders: its ladder, models of today, fp8 beside bf16
COLLECTED = "train.jsonl", "generate.jsonl"  # the files of runs in results/<device>/


class StoredRow(NamedTuple):
    """A row and its place: a result.json, or a line of a .jsonl file."""

    row: dict
    path: Path
    number: int = 0

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}" if self.number else str(self.path)


@dataclass
class ReportSource:
    """A folder's rows."""

    folder: Path
    choices: list[Choice]  # of training
    generations: list[Choice]
    benchmarks: dict[str, list[dict]]  # a name of BENCHMARKS -> its rows, oldest first
    from_results: bool  # True for a folder in results/, False for a sweep's or a run's
    left_out: list[str] = field(default_factory=list)  # files and lines without a row that can be shown

    @property
    def measured_choices(self) -> list[Choice]:
        """The choices with a speed, by preset and precision, fastest first."""
        return sort_measured(self.choices)

    @property
    def measured_generations(self) -> list[Choice]:
        """The choices of generation with a speed, by preset, precision, batch and prompt, fastest first."""
        return sort_measured(self.generations)

    @property
    def measured(self) -> list[Choice]:
        return [*self.measured_choices, *self.measured_generations]

    @property
    def environments(self) -> list[dict]:
        rows = [row for choice in self.all_choices for row in choice.rows]
        rows += [row for benchmark in self.benchmarks.values() for row in benchmark]
        return [row["env"] for row in rows if row.get("env")]

    @property
    def all_choices(self) -> list[Choice]:
        return [*self.choices, *self.generations]

    @property
    def searches(self) -> list[dict]:
        """The newest search of each choice that found a length."""
        return newest_searches([row for row in self.benchmarks["context"] if found_length(row)])

    def row_command(self, row: dict) -> str:
        """Return the command to copy for a row of a benchmark: the row's own, for a row of results/ clone_command()."""
        return clone_command(row) if self.from_results else rerun_command(row)


def sort_measured(choices: list[Choice]) -> list[Choice]:
    """Return the choices with a speed, by preset (tiny, for tests, comes last), precision and sizes, fastest first.

    bf16 comes before the other precisions: most rows are in bf16, and a reader sees the first bars only.
    """

    def order(choice: Choice) -> tuple:
        sizes = (sequences(choice.row), prompt_tokens(choice.row)) if choice.generates else ()
        preset = choice.preset == "tiny", len(choice.preset), choice.preset
        return *preset, choice.precision != "bf16", choice.precision, *sizes, -choice.comparable_speed

    return sorted((choice for choice in choices if choice.speed), key=order)


def read_source(folder: Path, force: bool = False) -> ReportSource:
    """Read the folder of a sweep, of one run, or of a device in results/, and compare its choices: make_source()."""
    return make_source(folder, *read_lines(folder), force)


def make_source(folder: Path, lines: list[StoredRow], left_out: list[str], force: bool = False) -> ReportSource:
    """Compare the choices of these lines of a folder.

    With `force`, choices that differ in more than their kernels are compared too. Raises UserError if there are no rows
    of training, of generation or of a benchmark.
    """
    rows: dict[str, list[dict]] = {}  # the name of the file -> its rows
    for line in lines:
        rows.setdefault(line.path.name, []).append(line.row)
    jobs = [line for line in lines if line.path.name == "result.json"]
    from_results = any((folder / name).exists() for name in COLLECTED)
    runs = [line.row for line in jobs if is_run(line.row)]
    for path in dict.fromkeys(line.path for line in lines if line.path.name in COLLECTED):
        collected = [line.row for line in lines if line.path == path]
        # The steps of a run with evaluations are not timed alone, so the README's table of throughput omits it, too
        runs += newest_choices([row for row in collected if not row["config"].get("train", {}).get("eval_every")])
    all_choices = group_runs(runs, from_results)
    choices, generations = ([choice for choice in all_choices if choice.generates == kind] for kind in (False, True))
    benchmarks = {  # old rows have no `started`, so they come first
        name: sorted(rows.get(f"{name}.jsonl", []), key=lambda row: row.get("started", "")) for name in BENCHMARKS
    }
    benchmarks["context"] += [line.row for line in jobs if is_search(line.row)]
    check(
        all_choices or any(benchmarks.values()),
        f"{folder} has no rows of training without evaluations, of generation or of a benchmark: name the folder of a "
        "sweep, or one in results/",
    )
    for same_kind in (choices, generations):
        set_qualifiers(same_kind)
        mark_lowest_loss(same_kind)
        compare_choices([choice for choice in same_kind if choice.speed], force, from_results)
    return ReportSource(folder, choices, generations, benchmarks, from_results, left_out)


def read_lines(folder: Path) -> tuple[list[StoredRow], list[str]]:
    """Return (the lines of a folder that hold a row, the places that hold none).

    The folder of a device has the runs of the folders with SUFFIXES, too: results/h200 has those of results/h200-rungs,
    results/h200-today and results/h200-fp8. It also has the benchmarks of kernels in results/h200-languages.
    """
    lines, left_out = [], []
    for path in job_results(folder):
        row = read_run(path.parent)
        if row:
            lines.append(StoredRow(row, path))
        else:
            left_out.append(str(path))
    device = folder.resolve()
    folders = [folder, *(device.parent / f"{device.name}{suffix}" for suffix in SUFFIXES)]
    paths = [place / name for place in folders for name in COLLECTED]
    for name in BENCHMARKS:
        paths += sorted({*folder.glob(f"*/{name}.jsonl"), *folder.glob(f"{name}.jsonl")})
    paths.append(device.parent / f"{device.name}-languages" / "kernels.jsonl")
    for path in paths:
        good, bad = read_jsonl(path)
        lines += [StoredRow(row, path, number) for number, row in good]
        left_out += [f"{path}, line {number}" for number in bad]
    return lines, left_out


def is_search(row: dict) -> bool:
    """Return whether the row is of scripts.max_context."""
    return "probe" in row.get("config", {})


def found_length(row: dict) -> bool:
    return bool(row.get("context/max_train") or row.get("context/max_generate"))


def is_run(row: dict) -> bool:
    """Return whether the row is of training or of generation. scripts.evaluate reads a checkpoint, too."""
    return is_generation(row) or not (is_search(row) or "checkpoint" in row.get("config", {}))


def job_results(folder: Path) -> list[Path]:
    """Return the result.json files of a sweep's jobs or of a run, in the order of the jobs."""

    def by_number(path: Path) -> list:  # job 10 comes after job 9
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.parent.name)]

    return sorted({*folder.glob("*/result.json"), *folder.glob("result.json")}, key=by_number)
