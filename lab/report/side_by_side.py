"""Compare the same choices in several folders: two GPUs, two commits, two versions of PyTorch."""

from pathlib import Path
from typing import Any

from lab.report.choices import Choice
from lab.report.source import read_source
from lab.report.tables import markdown_table
from lab.sweep.compare import MACHINE, ratio, settings, value_differences
from runtime.config import check


def side_by_side(folders: list[Path]) -> str:
    """Return Markdown: the tokens/s of each choice in each folder, and the ratio to the first folder.

    A choice is found again by its settings. Raises UserError if a folder has no rows, or if no measured choice of the
    first folder is in another one.
    """
    first, *others = map(read_source, folders)
    names = list(map(str, folders))
    lines = []
    for choice in first.measured:
        line = [choice.title, f"{choice.speed:,.0f}"]
        for source in others:
            match = next((other for other in source.measured if have_same_settings(other, choice)), None)
            if match:
                compared = ratio(match.rows, choice.rows)  # None without timed intervals
                line += [f"{match.speed:,.0f}", str(compared or f"{match.speed / choice.speed:.2f}x")]
            else:
                line += ["", ""]
        if any(line[2:]):
            lines.append(line)
    check(lines, f"{', '.join(names)} have no measured choice in common: their configs differ")
    head = ["choice", names[0]]
    parts = ["", "Tokens/s, and the ratio with its 95% interval. A tie means that the interval contains 1."]
    base = next(iter(first.environments), {})
    for name, source in zip(names[1:], others, strict=True):
        head += [name, f"{name} / {names[0]}"]
        env = next(iter(source.environments), {})
        if differs := [text for key in MACHINE for text in value_differences(key, env.get(key), base.get(key))]:
            parts.append(f"- {name}: {'; '.join(differs)}")
    return "\n".join([markdown_table(head, lines), *parts])


def have_same_settings(one: Choice, other: Choice) -> bool:
    """Return whether both are of training, or both of generation, and the settings are equal that both configs have.

    A later commit may have new ones.
    """
    return one.generates == other.generates and agree_on_common_keys(settings(one.row), settings(other.row))


def agree_on_common_keys(value: Any, other: Any) -> bool:
    if isinstance(value, dict) and isinstance(other, dict):
        return all(agree_on_common_keys(value[key], other[key]) for key in value.keys() & other.keys())
    return value == other
