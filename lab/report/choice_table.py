"""The tables of the page and of report.md, and the table of W&B."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.judge import verdict
from lab.report.choices import Choice, add_unmeasured_losses
from lab.report.describe import log_path
from lab.report.max_context_table import HEAD, search_cells
from lab.report.presets import preset_of
from lab.report.source import ReportSource, found_length
from lab.report.tables import markdown_table, markdown_text
from lab.sweep.table import figure_columns, has_figures, number_cell, read_sort, speed

ENVIRONMENT = "device", "driver", "cuda", "cudnn", "torch", "triton", "python", "git_commit"


@dataclass
class Line:
    """A line of a table: its cells, the command that measures it again, and the choice that it shows, if any.

    A filter of the page ignores a setting that is "".
    """

    cells: list[str]
    command: str = ""
    choice: Choice | None = None
    preset: str = ""
    precision: str = ""


def choice_line(cells: list[str], choice: Choice) -> Line:
    return Line(cells, choice.command, choice, choice.preset, choice.precision)


def search_line(source: ReportSource, cells: list[str], row: dict) -> Line:
    """Return the line of a row of scripts.max_context."""
    return Line(cells, source.row_command(row), None, preset_of(row), str(row["config"]["precision"]))


@dataclass
class Table:
    """A table of the page and of report.md."""

    id: str
    title: str
    columns: list[str]
    lines: list[Line]


def report_tables(source: ReportSource) -> list[Table]:
    """Return the tables that have lines."""
    searches = [search_line(source, search_cells(row), row) for row in source.searches]
    verdicts = source.benchmarks["judge"][::-1]
    verdict_lines = [
        Line(verdict.verdict_cells(row), source.row_command(row), None, *verdict.trained_settings(row))
        for row in verdicts
    ]
    tables = [
        Table("verdicts", "Verdicts", verdict.COLUMNS, verdict_lines),
        choice_table("choices", "Every choice of training", listed_choices(source)),
        choice_table("generations", "Every choice of generation", source.measured_generations),
        Table("searches", "Every longest context", HEAD, searches),
        failures_table(failures(source)),
    ]
    return [table for table in tables if table.lines]


def listed_choices(source: ReportSource) -> list[Choice]:
    """Return the choices of training that have a speed or a validation loss, in the order of sweep.sort."""
    sort = read_sort(source.folder, [row for choice in source.choices for row in choice.rows])
    return add_unmeasured_losses(source.measured_choices, source.choices, sort)


def choice_table(id: str, title: str, choices: list[Choice]) -> Table:
    columns = choice_columns(choices)
    lines = [choice_line([cell(choice) for cell in columns.values()], choice) for choice in choices]
    return Table(id, title, list(columns), lines)


def choice_columns(choices: list[Choice]) -> dict[str, Callable[[Choice], str]]:
    """Return the columns of choices that are all of training, or all of generation; empty columns are left out."""
    cells = figure_columns(choice.row for choice in choices)
    cells["caches"] = number_cell("{}", "perf/cache")
    cells["parity"] = lambda row: verdict_text(row.get("parity"), ["loss", "gradient"])
    cells["proof"] = lambda row: verdict_text(row.get("proof"), ["logits"])
    columns = {name: lambda choice, cell=cell: cell(choice.row) for name, cell in cells.items()}
    columns["val loss"] = lambda choice: choice.loss_text
    columns["peak GiB"] = lambda choice: f"{choice.memory:.{2 if choice.generates else 1}f}" if choice.memory else ""
    first = {"choice": lambda choice: choice.title, "tokens/s": speed_cell}
    columns = {**first, "of the baseline": lambda choice: choice.ratio_text, **columns}
    return {name: cell for name, cell in columns.items() if any(map(cell, choices))}


def speed_cell(choice: Choice) -> str:
    """Return a text such as "580,123 (579,000 to 581,000), 2 runs"; empty without a speed."""
    if not choice.speed:
        return ""
    (low, high), count = choice.spread, len(choice.speeds)
    runs = f", {count} runs" if count > 1 else ""
    return f"{choice.speed:,.0f} ({low:,.0f} to {high:,.0f}){runs}"


def verdict_text(proof: dict | None, names: list[str]) -> str:
    """Return a text such as "holds, loss 2.1e-03 of 1.0e-02": an error and its bound, or why nothing is claimed.

    Empty if the row has no proof.
    """
    if not proof:
        return ""
    pairs = [(name, proof.get(f"{name}_error"), proof.get(f"{name}_bound")) for name in names]
    errors = [f"{name} {error:.1e} of {bound:.1e}" for name, error, bound in pairs if None not in (error, bound)]
    result = {True: "holds", False: "fails", None: proof.get("why", "")}[proof.get("ok")]
    return ", ".join([result, *errors])


def failures(source: ReportSource) -> list[Line]:
    """Return a line for each row without a result."""
    lines = []
    for choice in source.all_choices:
        for row in choice.rows:
            if not has_figures(row):
                reason = "too short" if row["status"] == "ok" else row["status"]
                cells = [choice.title, reason, log_path(source.folder, row)]
                lines.append(choice_line([*filter(None, cells)], choice))
    for row in source.benchmarks["context"]:
        if not found_length(row):
            shortest = f"not even 128 tokens: {row.get('context/train/limit')}"
            reason = shortest if row["status"] == "ok" else row["status"]
            lines.append(search_line(source, [f"longest context, {row['name']}", reason], row))
    return lines


def failures_table(lines: list[Line]) -> Table:
    """Return the table of failures(). Its last column has the log.txt of failed jobs, if there is one."""
    columns = ["run", "reason", "log"][: max((len(line.cells) for line in lines), default=2)]
    for line in lines:
        line.cells += [""] * (len(columns) - len(line.cells))
    return Table("failures", "No result", columns, lines)


def notes(source: ReportSource) -> list[str]:
    """Return sentences: on which machines the rows are, how choices are compared, and which files are left out."""
    machines = []
    for key in ENVIRONMENT:
        length = 7 if key == "git_commit" else None
        if values := dict.fromkeys(str(env[key])[:length] for env in source.environments if env.get(key)):
            machines.append(f"{key} {', '.join(values)}")
    sentences = [f"Environment: {'; '.join(machines)}."] if machines else []
    if len(source.measured) > 1:
        first = "" if source.from_results else "the kernels of the first job, else "
        sentences.append(
            f"Each choice is compared with the baseline of its settings: {first}compile · sdpa, else eager, else the "
            "choice that ran first. A tie means that the 95% interval contains 1. With --force all are compared with "
            "the first choice, whatever their settings."
        )
    if source.benchmarks["judge"]:
        sentences.append("A verdict is that of the training. A pair of figures has the judged backend first.")
    if source.left_out:
        sentences.append(f"Left out, because they are damaged or lack values: {'; '.join(source.left_out)}.")
    return sentences


def wandb_table(source: ReportSource) -> list[list]:
    """Return the head and a line for each run of training: its settings, all numbers of its row, and its command.

    The lines have the order of the page's table; runs without a speed come last.
    """
    choices = source.measured_choices + [choice for choice in source.choices if not choice.speed]
    rows = [row for choice in choices for row in choice.rows]
    numbers = {key: None for row in rows for key in row if "/" in key and isinstance(row[key], int | float)}
    lines = [["choice", "preset", "precision", "status", *numbers, "of the baseline", "command"]]
    for choice in choices:
        for row in choice.rows:
            settings = [choice.title, choice.preset, choice.precision, row["status"]]
            values = [row.get(key) if speed(row) else None for key in numbers]
            lines.append([*settings, *values, choice.ratio_text, choice.command])
    return lines


def report_markdown(source: ReportSource, pictures: list[Path]) -> str:
    """Return the text of report.md, which shows the pictures beside it."""
    parts = [f"# {markdown_text(source.folder.resolve().name)}", *map(markdown_text, notes(source))]
    for table in report_tables(source):
        parts += [f"## {table.title}", markdown_table(table.columns, [line.cells for line in table.lines])]
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    return "\n\n".join([*parts, "[report.html](report.html) has all figures."]) + "\n"
