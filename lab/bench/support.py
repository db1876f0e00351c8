"""Tables of what each backend can do, from the rows of `python -m scripts.doctor matrix=true keep=true`.

A row of results/<device>/support.jsonl is for one backend: {"op", "impl", "answers": {column: {value: status}}, "env"}.
"""

from tabulate import tabulate

from lab.bench.probe import ERRORS, first_word


def cell(answers: dict[str, str]) -> str:
    """Return "yes", "no", or the values at which the backend is right, then the others: "64, 96; **wrong** 80"."""
    values: dict[str, list[str]] = {}
    for value, status in answers.items():
        values.setdefault(first_word(status), []).append(value)
    right = values.get("ok", [])
    if len(right) == len(answers):
        return "yes"
    parts = [", ".join(right)] if right else []
    parts += [f"**{what}** {', '.join(values[what])}" for what in ERRORS if what in values]
    return "; ".join(parts) or "no"


def columns_with(answers: dict[str, dict[str, str]], status: str) -> str:
    """Return the columns in which a backend has this status: "fp32 769; compile".

    A column has the values with this status after it, unless all of its values have it.
    """
    places = []
    for column, values in answers.items():
        matching = [value for value, value_status in values.items() if value_status == status]
        if len(matching) == len(values):
            places.append(column)
        elif matching:
            places.append(f"{column} {', '.join(matching)}")
    return "; ".join(places)


def reasons(op: str, impl: str, answers: dict[str, dict[str, str]]) -> list[str]:
    """Return a line for each status that is not ok: where the backend has it, and why."""
    lines = []
    for status in dict.fromkeys(status for values in answers.values() for status in values.values()):
        if first_word(status) != "ok":
            where = "" if runs_nowhere(answers) else f" {columns_with(answers, status)}"
            lines.append(f"- `{op}={impl}`{where}: {status.removeprefix('unavailable: ')}")
    return lines


def runs_nowhere(answers: dict[str, dict[str, str]]) -> bool:
    """Return whether the backend is unavailable everywhere, for one reason."""
    statuses = {status for values in answers.values() for status in values.values()}
    return len(statuses) == 1 and first_word(statuses.pop()) == "unavailable"


def tables(rows: list[dict]) -> str:
    """Return a Markdown table for each op, from the newest row of each backend, and the reasons below it."""
    newest = {(row["op"], row["impl"]): row["answers"] for row in rows}
    parts = []
    for op in dict.fromkeys(op for op, _ in newest):
        backends = {impl: answers for (row_op, impl), answers in sorted(newest.items()) if row_op == op}
        columns = list(dict.fromkeys(column for answers in backends.values() for column in answers))
        lines, notes = [], []
        for impl, answers in backends.items():
            if not runs_nowhere(answers):
                lines.append([impl, *(cell(answers[column]) if column in answers else "" for column in columns)])
            notes += reasons(op, impl, answers)
        parts.append(tabulate(lines, [op, *columns], tablefmt="github", disable_numparse=True))
        if notes:
            parts.append("\n".join(notes))
    return "\n\n".join(parts)
