"""The table of what each backend can do, from the rows that `python -m scripts.doctor --matrix keep=true` keeps.

A row of results/<device>/support.jsonl is a backend: {"op", "impl", "answers": {column: {value: status}}, "env"}.
A status is "ok: what ran", "unavailable: why", which is the backend's own word, "wrong: by how much" or "failed: how".
"""


def word(status: str) -> str:
    """ok, unavailable, wrong or failed."""
    return status.partition(":")[0]


def cell(answers: dict[str, str]) -> str:
    """yes, no, or the values for which it is right; and in bold those for which it says nothing and is not."""
    found = {}
    for value, status in answers.items():
        found.setdefault(word(status), []).append(value)
    right = found.get("ok", [])
    if len(right) == len(answers):
        return "yes"
    bad = [f"**{what}** {', '.join(found[what])}" for what in ("wrong", "failed") if what in found]
    return "; ".join([", ".join(right)] * bool(right) + bad) or "no"


def places(answers: dict[str, dict[str, str]], status: str) -> str:
    """Where a backend said this: whole columns, or a column and values."""
    told = []
    for column, values in answers.items():
        where = [value for value, said in values.items() if said == status]
        told += [column if len(where) == len(values) else f"{column} {', '.join(where)}"] * bool(where)
    return "; ".join(told)


def tables(rows: list[dict]) -> str:
    """A Markdown table an op, of the newest row of each backend, and below it what it says no for."""
    newest = {(row["op"], row["impl"]): row["answers"] for row in rows}
    told = []
    for op in dict.fromkeys(op for op, _ in newest):
        found = {impl: answers for (of, impl), answers in sorted(newest.items()) if of == op}
        columns = list(dict.fromkeys(column for answers in found.values() for column in answers))
        lines, reasons = [[op, *columns]], []
        for impl, answers in found.items():
            statuses = dict.fromkeys(status for values in answers.values() for status in values.values())
            whys = [status for status in statuses if word(status) != "ok"]
            nowhere = len(statuses) == len(whys) == 1 and word(*whys) == "unavailable"
            if not nowhere:
                lines.append([impl, *(cell(answers[column]) if column in answers else "" for column in columns)])
            for why in whys:
                where = "" if nowhere else f" {places(answers, why)}"
                reasons.append(f"- `{op}={impl}`{where}: {why.removeprefix('unavailable: ')}")
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * max(3, width) for width in widths])
        padded = ([text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines)
        told += ["\n".join(f"| {' | '.join(line)} |" for line in padded), "\n".join(reasons)]
    return "\n\n".join(filter(None, told))
