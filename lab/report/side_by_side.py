"""Compare the same choices in several folders: two GPUs, two commits, two versions of PyTorch."""

from pathlib import Path
from typing import Any

from lab.report.choices import Choice
from lab.report.source import ReportSource, read_source
from lab.report.tables import markdown_table
from lab.sweep.compare import MACHINE, ratio, settings, value_differences
from runtime.config import check


def side_by_side(folders: list[Path]) -> str:
    """Return Markdown: the tokens/s of each choice in each folder, and the ratio to the first folder.

    A choice is found again by its settings. Raises UserError if a folder has no rows, or if no measured choice of the
    first folder is in another one.
    """
    first, *others = (read_source(folder) for folder in folders)
    names = column_names(folders)
    lines = []
    for choice in measured(first):
        line = [choice.title, format_speed(choice)]
        for source in others:
            match = next((other for other in measured(source) if have_same_settings(other, choice)), None)
            line += [format_speed(match), ratio_cell(match, choice)] if match else ["", ""]
        lines.append(line)
    lines = [line for line in lines if any(line[2:])]
    check(lines, f"{', '.join(map(str, folders))} have no measured choice in common: their configs differ")
    head = ["choice", names[0]]
    for name in names[1:]:
        head += [name, f"{name} / {names[0]}"]
    sentence = "Tokens/s, and the ratio with its 95% interval. A tie means that the interval contains 1."
    notes = [machine_note(name, source, first) for name, source in zip(names[1:], others, strict=True)]
    return "\n".join([markdown_table(head, lines), "", sentence, *filter(None, notes)])


def have_same_settings(one: Choice, other: Choice) -> bool:
    """Return whether both are of training, or both of generation, and the settings are equal that both configs have.

    A later commit may have new ones.
    """
    return one.generates == other.generates and agree_on_common_keys(settings(one.row), settings(other.row))


def agree_on_common_keys(value: Any, other: Any) -> bool:
    if isinstance(value, dict) and isinstance(other, dict):
        return all(agree_on_common_keys(value[key], other[key]) for key in value.keys() & other.keys())
    return value == other


def measured(source: ReportSource) -> list[Choice]:
    return [*source.measured_choices, *source.measured_generations]


def column_names(folders: list[Path]) -> list[str]:
    """Return the folders' last names, or the whole paths if two of them have the same."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def format_speed(choice: Choice) -> str:
    return f"{choice.speed:,.0f}"


def ratio_cell(choice: Choice, base: Choice) -> str:
    """Return the ratio with its interval. Without timed intervals there is only the ratio of the medians."""
    return str(ratio(choice.rows, base.rows) or f"{choice.speed / base.speed:.2f}x, without an interval")


def machine_note(name: str, source: ReportSource, first: ReportSource) -> str:
    """Return what differs between the machine and the commit of a folder and of the first one; "" if nothing does."""
    env, base = (next(iter(each.environments), {}) for each in (source, first))
    lines = [line for key in MACHINE for line in value_differences(key, env.get(key), base.get(key))]
    return f"- {name}: {'; '.join(lines)}" if lines else ""
