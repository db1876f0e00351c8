"""The table of a sweep: the figures of each choice, fastest first, and the ratio of its speed to the first choice's."""

import statistics

from lab.sweep.compare import differences, ratio

FIGURES = ["tokens/s", "p20 to p80", "MFU", "peak GiB", "first step", "loss"]


def speed(row: dict) -> float | None:
    """Return the tokens/s of a run; None if the run is not ok, or was too short to measure."""
    return row.get("perf/tokens_per_sec") if row["status"] == "ok" else None


def figure_cells(row: dict) -> list[str]:
    """Return a run's cells under FIGURES. If the run has no speed, the first cell says why."""
    if row["status"] != "ok":
        return [row["status"], *[""] * (len(FIGURES) - 1)]
    rate, spread = "too short", ""
    if speed(row):
        rate = f"{speed(row):,.0f}"
        spread = f"{row['perf/tokens_per_sec/p20']:,.0f} to {row['perf/tokens_per_sec/p80']:,.0f}"
    memory, first_step = row["mem/peak_allocated_gib"] or row["mem/peak_rss_gib"], row["perf/first_step_s"]
    return [
        rate,
        spread,
        f"{100 * row['perf/mfu']:.1f}%" if row["perf/mfu"] else "",
        f"{memory:.1f}",
        "" if first_step is None else f"{first_step:.1f} s",
        "" if row["train/loss"] is None else f"{row['train/loss']:.3f}",
    ]


def sweep_table(choices: dict[str, list[dict]]) -> str:
    """Return the table as text. `choices` is name -> rows of the runs, the baseline first.

    Choices without a speed come last.
    """
    bases = next(iter(choices.values()))
    measured = {name: [row for row in rows if speed(row) is not None] for name, rows in choices.items()}
    fastest = sorted((name for name in measured if measured[name]), key=lambda name: -speed(median_run(measured[name])))
    lines = [["job", FIGURES[0], "of the first", *FIGURES[1:]]]
    for name in fastest:
        tokens_per_sec = f"{statistics.median(map(speed, measured[name])):,.0f}"
        rest = figure_cells(median_run(measured[name]))[1:]
        lines.append([name, tokens_per_sec, ratio_cell(choices[name], bases), *rest])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # a choice without a speed comes after the widths, because its reason is long; only its name needs a width
    widths[0] = max(widths[0], *map(len, choices))
    lines += [[name, figure_cells(rows[0])[0]] for name, rows in choices.items() if not measured[name]]
    return "\n".join("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in lines)


def median_run(rows: list[dict]) -> dict:
    """Return the run with the median speed; with an even number of runs, the slower of the middle two."""
    return sorted(rows, key=speed)[(len(rows) - 1) // 2]


def ratio_cell(rows: list[dict], bases: list[dict]) -> str:
    """Return the ratio of the speeds; empty for the baseline itself, and if more than the kernels differs."""
    measured, measured_bases = ([row for row in runs if speed(row) is not None] for runs in (rows, bases))
    if rows is bases or not measured or not measured_bases:
        return ""
    if differences(median_run(measured), median_run(measured_bases)):
        return ""
    return str(ratio(rows, bases) or "")
