"""Name gluon in old rows, in which `triton` ran Gluon on Hopper.

Such a row says "Gluon" in what it ran: "triton (triton 3.6.0, Gluon)". No newer row does. The files stay as they are;
only readers get the new names, so tables, comparisons and reproduced commands name what computed.
"""

import shlex

from common.terminal import shell_command
from kernels.names import override_key


def rename_gluon(row: dict) -> list[dict]:
    """Return the rows for a row of any kind: the row itself, or one that names gluon. A support row may become two.

    A row may be from somebody else, so every part of it may be missing or of another type.
    """
    if "Gluon" not in str(row):
        return [row]
    answers, cases = row.get("answers"), row.get("cases")
    if isinstance(answers, dict):
        return split_support(row, answers)
    if isinstance(row.get("executed"), str):
        return [row | {key: new_name(row[key], row["executed"]) for key in ("impl", "executed") if key in row}]
    if isinstance(cases, dict):
        return [rename_in_verdict(row, cases)]
    return [rename_in_run(row)]


def new_name(name: object, detail: object) -> object:
    """Return "gluon" for "triton", "gluon_whole" for "triton_whole (...)", if `detail` says that it ran Gluon."""
    is_gluon = isinstance(name, str) and name.startswith("triton") and "Gluon" in str(detail)
    return name.replace("triton", "gluon", 1) if is_gluon else name


def rename_in_run(row: dict) -> dict:
    """Rename in a run's `kernels` and `config`, and choose gluon in its `command`, which may name a preset."""
    kernels, config = (row.get(key) if isinstance(row.get(key), dict) else {} for key in ("kernels", "config"))
    in_gluon = {op: detail for op, detail in kernels.items() if new_name(detail, detail) != detail}
    groups = {key: dict(config[key]) for key in ("kernels", "attn") if isinstance(config.get(key), dict)}
    choices = {}
    for op, detail in in_gluon.items():
        group, key = (groups.get("attn"), "impl") if op == "attention" else (groups.get("kernels"), op)
        if group and key in group:
            group[key] = new_name(group[key], detail)
            choices[override_key(op)] = group[key]
    renamed = {"kernels": kernels | {op: new_name(detail, detail) for op, detail in in_gluon.items()}}
    if groups:
        renamed["config"] = config | groups
    if isinstance(row.get("command"), str):
        renamed["command"] = choose_in_command(row["command"], choices)
    return row | renamed if in_gluon else row


def choose_in_command(command: str, choices: dict[str, str]) -> str:
    """Return the command with these overrides {key: value} in the place of its own for these keys."""
    try:
        words = shlex.split(command)
    except ValueError:  # it is no shell command, and cannot be run again either
        return command
    others = [word for word in words if word.partition("=")[0] not in choices]
    return shell_command(*others, *(f"{key}={value}" for key, value in choices.items()))


def rename_in_verdict(row: dict, cases: dict) -> dict:
    """Rename the judged backend: the verdict is about a training, and its cases say what the training ran."""
    name, renamed = row.get("impl"), new_name(row.get("impl"), cases)
    sides = {
        key: {renamed if side == name else side: value for side, value in row[key].items()}
        for key in ("benchmark", "training")
        if isinstance(row.get(key), dict)
    }
    command = row.get("command")
    if isinstance(command, str):
        words = command.split(" ")
        sides["command"] = " ".join(f"impl={renamed}" if word == f"impl={name}" else word for word in words)
    return row | sides | {"impl": renamed}


def split_support(row: dict, answers: dict) -> list[dict]:
    """Return the row with the answers of Triton, and a second row with those of Gluon."""
    rows = []
    for in_gluon in (False, True):
        part = {
            column: {value: answer for value, answer in values.items() if ("Gluon" in str(answer)) == in_gluon}
            for column, values in answers.items()
            if isinstance(values, dict)
        }
        part = {column: values for column, values in part.items() if values}
        rows.append(row | {"impl": new_name(row.get("impl"), part), "answers": part})
    return [part for part in rows if part["answers"]] or [row]
