"""The tables of choices: for the page, for report.md, and as numbers for W&B."""

from dataclasses import dataclass
from pathlib import Path

from lab.judge.verdict import COLUMNS, verdict_cells
from lab.report.choices import Choice
from lab.report.describe import newest_searches
from lab.report.max_context_table import max_context_table
from lab.report.source import ReportSource
from lab.report.tables import markdown_table, markdown_text
from lab.rerun import rerun_command
from lab.sweep.table import POWER, SLOWER, Cell, figure_columns, slower_cell, speed

SPEED_COLUMNS = ["choice", "tokens/s", "of the baseline"]
TRAINING_COLUMNS = [*SPEED_COLUMNS, "GiB", "first step", "parity", "most time in"]
NUMBERS = [  # keys of a row
    "perf/tokens_per_sec",
    "perf/tokens_per_sec/p20",
    "perf/tokens_per_sec/p80",
    "perf/step_ms",
    "perf/mfu",
    "perf/first_step_s",
    "perf/recompiles",
    "mem/peak_allocated_gib",
    "power/watts",
    "power/joules_per_token",
    "power/sm_mhz",
    "power/at_limit",
    "train/loss",
]
WANDB_COLUMNS = ["choice", "model", "precision", "status", *NUMBERS]
WANDB_COLUMNS += ["ratio", "ratio_low", "ratio_high", "baseline", "parity", "command"]


@dataclass
class Table:
    """A table of the page and of report.md: its head, and the choice and the cells of each line."""

    id: str
    title: str
    columns: list[str]
    lines: list[tuple[Choice, list[str]]]


def choice_tables(source: ReportSource) -> list[Table]:
    """Return the tables of training and of generation; a table without lines is left out."""
    figures = figure_columns(choice.row for choice in source.measured_generations)
    columns = [*SPEED_COLUMNS, *figures, "proof", "most time in"]
    rows = [choice.row for choice in source.measured_choices]
    optional = {name: cell for name, cell in {**SLOWER, **POWER}.items() if any(map(cell, rows))}
    training = [(choice, training_cells(choice, optional)) for choice in source.measured_choices]
    generation = [(choice, generation_cells(choice, figures)) for choice in source.measured_generations]
    tables = [
        Table("choices", "Every choice", [*TRAINING_COLUMNS, *optional], training),
        Table("generations", "Every choice of generation", columns, generation),
    ]
    return [table for table in tables if table.lines]


def training_cells(choice: Choice, optional: dict[str, Cell]) -> list[str]:
    """Return the cells of a choice of training under TRAINING_COLUMNS and `optional`. The choice must have a speed."""
    row, memory = choice.row, f"{choice.memory:.1f}" if choice.memory else ""
    cells = [memory, first_step_cell(row), parity_cell(row), longest_families(row, "{:.1f} ms")]
    return [*speed_cells(choice), *cells, *(cell(row) for cell in optional.values())]


def generation_cells(choice: Choice, figures: dict[str, Cell]) -> list[str]:
    """Return the cells of a choice of generation. The choice must have a speed."""
    row = choice.row
    measured = [cell(row) for cell in figures.values()]
    return [*speed_cells(choice), *measured, proof_cell(row), longest_families(row, "{:.3f} ms")]


def speed_cells(choice: Choice) -> list[str]:
    """Return the cells under SPEED_COLUMNS. The choice must have a speed."""
    (low, high), count = choice.spread, len(choice.speeds)
    runs = f", {count} runs" if count > 1 else ""
    return [choice.title, f"{choice.speed:,.0f} ({low:,.0f} to {high:,.0f}){runs}", choice.comparison_text]


def longest_families(row: dict, template: str) -> str:
    """Return the three families of kernels that take most of a step, such as "gemm 68.0 ms, mlp 9.5 ms"."""
    families = (row.get("receipt") or {}).get("families") or {}
    longest = sorted(families.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{family} {template.format(ms)}" for family, ms in longest)


def first_step_cell(row: dict) -> str:
    """Return a text such as "24.1 s, cold caches"; empty if the row has no first step."""
    seconds, cache = row.get("perf/first_step_s"), row.get("perf/cache")
    if seconds is None:
        return ""
    return f"{seconds:.1f} s, {cache} caches" if cache else f"{seconds:.1f} s"


def parity_cell(row: dict) -> str:
    """Return a text such as "holds, loss 2.1e-03"; empty without parity."""
    parity = row.get("parity") or {}
    if parity.get("ok") is None:
        return ""
    return f"{'holds' if parity['ok'] else 'fails'}, loss {parity['loss_error']:.1e}"


def proof_cell(row: dict) -> str:
    """Return a text such as "holds, logits 1.2e-02", or why a generation is not exact; empty without a proof."""
    proof = row.get("proof") or {}
    if proof.get("ok"):
        return f"holds, logits {proof['logits_error']:.1e}"
    return proof.get("why") or ""


def failures(source: ReportSource) -> list[tuple[str, str, str, str]]:
    """Return (id, name, reason, command) of each row without a result; the id and the command may be empty."""
    lines = []
    for choice, row in source.failed_runs:
        reason = "too short" if row["status"] == "ok" else row["status"]
        lines.append((choice.id, choice.title, reason, choice.command))
    for row in source.benchmarks["attention"]:
        if row.get("status", "ok") != "ok":
            lines.append(("", f"attention {row['impl']}, T = {row['T']:,}", row["status"], ""))
    for row in source.benchmarks["context"]:
        if not (row.get("context/max_train") or row.get("context/max_generate")):
            shortest = f"not even 128 tokens: {row.get('context/train/limit')}"
            reason = shortest if row["status"] == "ok" else row["status"]
            lines.append(("", f"longest context, {row['name']}", reason, rerun_command(row)))
    return lines


def notes(source: ReportSource) -> list[str]:
    """Return sentences: how the choices are compared, and which files are left out."""
    sentences = []
    measured = [*source.measured_choices, *source.measured_generations]
    others = [choice for choice in measured if not choice.is_baseline]
    if others:
        first = "" if source.from_results else "the kernels of the first job, else "
        sentences.append(
            f"Each choice is compared with the baseline of its settings: {first}compile · sdpa, else eager, else the "
            "choice that ran first. A tie means that the 95% interval contains 1."
        )
    if any(slower_cell(choice.row) for choice in measured):
        sentences.append(
            "Slower than eager: an op whose backend took longer than eager when both were timed alone on this GPU "
            "(scripts.doctor speed=true), and how many times as long. `of compile`: beside eager under torch.compile."
        )
    if source.left_out:
        sentences.append(f"Left out, because they are damaged or lack values: {'; '.join(source.left_out)}.")
    if any(choice.comparison.ratio is None for choice in others):
        sentences.append(
            "A ratio without an interval compares the medians only, because its runs have too few timed intervals."
        )
    if any(choice.comparison.differs for choice in measured):
        sentences.append(
            "With --force every choice is compared with the first, and the table names the other settings that differ."
        )
    elif any(choice.not_compared for choice in measured):
        sentences.append("Choices at other settings are not compared. --force compares them, and names what differs.")
    return sentences


def wandb_table(source: ReportSource) -> list[list]:
    """Return the head and a line for each run of training, under WANDB_COLUMNS."""
    lines = []
    for choice in source.choices:
        comparison = choice.comparison
        ratio = comparison.ratio if comparison else None
        ratios = [
            comparison.value if comparison else None,
            ratio.low if ratio else None,
            ratio.high if ratio else None,
            comparison.base.title if comparison else None,
        ]
        parity = (choice.row.get("parity") or {}).get("ok")
        for row in choice.rows:
            settings = [choice.title, choice.model, choice.precision, row["status"]]
            numbers = [row.get(key) if speed(row) else None for key in NUMBERS]
            lines.append([*settings, *numbers, *ratios, parity, choice.command])
    return [WANDB_COLUMNS, *lines]


def report_markdown(source: ReportSource, pictures: list[Path]) -> str:
    """Return the text of report.md, which shows the pictures beside it."""
    parts = map(markdown_text, [source.folder.resolve().name, *notes(source)])
    parts = [f"# {next(parts)}", *parts]
    if verdicts := source.benchmarks["judge"][::-1]:
        parts.append(markdown_table(COLUMNS, map(verdict_cells, verdicts)))
    for table in choice_tables(source):
        parts.append(markdown_table(table.columns, [line for _, line in table.lines]))
    searches = newest_searches(source.benchmarks["context"])
    if searches:
        parts.append(max_context_table(searches))
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    failure_lines = [f"- {markdown_text(name)}: {markdown_text(reason)}" for _, name, reason, _ in failures(source)]
    if failure_lines:
        parts.append("\n".join(failure_lines))
    return "\n\n".join([*parts, "[report.html](report.html) has all figures."]) + "\n"
