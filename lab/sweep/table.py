"""The table of a sweep: the figures of each choice, best first, and the ratio of its speed to the first choice's."""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from common.files import read_json, write_json
from lab.sweep.compare import Ratio, differences, is_generation, ratio
from runtime.power import tokens_per_joule_cell

Cell = Callable[[dict], str]  # from a row to a cell of the table
SORTS = "speed", "val/loss"  # sweep.sort: fastest first, or the lowest validation loss first
SORT_FILE = "sweep.json"  # in the folder of a sweep: its sweep.sort, for the report


def speed_key(row: dict) -> str:
    """Return the key of the row's tokens/s; with /p20 and /p80 it is the key of their quantiles."""
    return "gen/decode_tokens_per_sec" if is_generation(row) else "perf/tokens_per_sec"


def speed(row: dict) -> float | None:
    """Return the tokens/s of a run; None if the run is not ok, or was too short to measure."""
    return row.get(speed_key(row)) if row["status"] == "ok" else None


def has_failed(row: dict) -> bool:
    """Return whether the run raised an error (`failed`) or computed wrong results (`wrong`). Its log.txt says more.

    A backend that cannot run (`unavailable`) and a full memory (`oom`) are no failures.
    """
    return row["status"].startswith(("failed", "wrong"))


def val_loss(row: dict) -> float | None:
    """Return the lowest validation loss of a run; None if the run is not ok, or did not evaluate.

    Older rows have the last one only.
    """
    return row.get("val/loss/min", row.get("val/loss")) if row["status"] == "ok" else None


def val_loss_cell(row: dict) -> str:
    return "" if val_loss(row) is None else f"{val_loss(row):.4f}"


def speed_cell(row: dict) -> str:
    return f"{speed(row):,.0f}" if speed(row) else "too short"


def spread_cell(row: dict) -> str:
    if not speed(row):
        return ""
    return " to ".join(f"{row[f'{speed_key(row)}/{quantile}']:,.0f}" for quantile in ("p20", "p80"))


def token_ms_cell(row: dict) -> str:
    """Return the milliseconds between the tokens of a sequence, such as "0.47 / 0.52": p50 and p99."""
    quantiles = [row.get(f"gen/token_ms/{quantile}") for quantile in ("p50", "p99")]
    return "" if None in quantiles else " / ".join(f"{ms:.2f}" for ms in quantiles)


def accepted_cell(row: dict) -> str:
    """Return how many tokens a step adds to a sequence; empty if the row drafts no tokens."""
    drafts = (row.get("config", {}).get("generate") or {}).get("speculate")
    return f"{row['gen/accepted_tokens']:.2f}" if drafts and row.get("gen/accepted_tokens") else ""


def number_cell(template: str, *keys: str) -> Cell:
    """Return a function that puts the first of these keys with a value into the template; "" without a value."""

    def cell(row: dict) -> str:
        values = [row[key] for key in keys if row.get(key) is not None]
        return template.format(values[0]) if values else ""

    return cell


def slower_cell(row: dict) -> str:
    """Return the ops whose backend is known to be slower than eager there, and by how much: "mlp 2.13x".

    In a compiled model the comparison may be with eager under torch.compile: "mlp 2.40x of compile". Older rows have no
    such key.
    """
    texts = []
    for op, known in (row.get("slower") or {}).items():
        of = " of compile" if known["baseline"] == "compile" else ""
        texts.append(f"{op} {known['ms'] / known['baseline_ms']:.2f}x{of}")
    return ", ".join(texts)


PEAK = "mem/peak_allocated_gib", "mem/peak_rss_gib"  # of a GPU, of a CPU
SLOWER: dict[str, Cell] = {"slower than eager": slower_cell}
POWER: dict[str, Cell] = {
    "tokens/J": tokens_per_joule_cell,
    "at power limit": number_cell("{:.0%}", "power/at_limit"),
    "SM MHz": number_cell("{:,.0f}", "power/sm_mhz"),
}
TRAINING: dict[str, Cell] = {
    "MFU": number_cell("{:.1%}", "perf/mfu"),
    "peak GiB": number_cell("{:.1f}", *PEAK),
    "first step": number_cell("{:.1f} s", "perf/first_step_s"),
    "loss": number_cell("{:.3f}", "train/loss"),
    "val loss": val_loss_cell,
    **SLOWER,
    **POWER,
}
GENERATION: dict[str, Cell] = {
    "ms a token p50 / p99": token_ms_cell,
    "of the bound": number_cell("{:.1%}", "gen/bandwidth_utilisation"),
    "first token": number_cell("{:.1f} ms", "gen/ttft_ms"),
    "peak GiB": number_cell("{:.2f}", *PEAK),
    "start": number_cell("{:.1f} s", "gen/warmup_s"),
    "accepted": accepted_cell,
    "speed-up by drafts": number_cell("{:.2f}x", "gen/speedup"),
    **SLOWER,
    **POWER,
}
# columns that a table leaves out if they are empty
OPTIONAL = {"accepted", "speed-up by drafts", "val loss", *SLOWER, *POWER}


def figure_columns(rows: Iterable[dict]) -> dict[str, Cell]:
    """Return the columns besides the speed and its spread. All rows are of training, or all of generation."""
    rows = list(rows)
    columns = GENERATION if any(map(is_generation, rows)) else TRAINING
    return {name: cell for name, cell in columns.items() if name not in OPTIONAL or any(map(cell, rows))}


def sweep_table(choices: dict[str, list[dict]], sort: str = "speed", logs: dict[str, str] | None = None) -> str:
    """Return the table as text. `choices` is name -> rows of the runs, in the order of the jobs; `sort` is of SORTS.

    Each choice is compared with the first choice of its settings, and a sort by speed follows the ratios. The lowest
    validation loss is marked `best`. Choices without a speed and a loss come last, with the reason, and with the path
    that `logs` has for their name.
    """
    measured = {name: [row for row in rows if has_figures(row)] for name, rows in choices.items()}
    shown = {name: shown_run(runs) for name, runs in measured.items() if runs}
    lowest = min((loss for loss in map(val_loss, shown.values()) if loss is not None), default=None)
    columns = figure_columns(row for rows in choices.values() for row in rows)
    lines, ranks = [], []
    for name, row in shown.items():
        first = first_comparable(row, choices.values())
        compared = None if first is choices[name] else ratio(choices[name], first)
        ranks.append(rank(sort, row, comparable_speed(measured[name], first, compared)))
        tokens_per_sec = f"{median_speed(measured[name]):,.0f}" if speed(row) else "too short"
        cells = {column: cell(row) for column, cell in columns.items()}
        if lowest is not None and val_loss(row) == lowest:
            cells["val loss"] = f"best {cells['val loss']}"
        lines.append([name, tokens_per_sec, str(compared or ""), spread_cell(row), *cells.values()])
    lines = [line for _, line in sorted(zip(ranks, lines, strict=True), key=lambda pair: pair[0])]
    lines.insert(0, ["job", "tokens/s", "of the first", "p20 to p80", *columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # a choice without figures comes after the widths, because its reason is long; only its name needs a width
    widths[0] = max(widths[0], *map(len, choices))
    for name, rows in choices.items():
        if name not in shown:
            reason = "too short" if rows[0]["status"] == "ok" else rows[0]["status"]
            lines.append([name, "  ".join(filter(None, [reason, (logs or {}).get(name)]))])
    return "\n".join("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in lines)


def write_sort(folder: Path, sort: str) -> None:
    """Write sweep.sort into the sweep's folder. The rows of our launcher lack it: a sweep may be sorted again."""
    write_json(folder / SORT_FILE, {"sort": sort})


def read_sort(folder: Path, rows: Iterable[dict]) -> str:
    """Return the sweep.sort of this folder: from its file, or else from the rows of another launcher."""
    sorts = [(row.get("config", {}).get("sweep") or {}).get("sort") for row in rows]
    with contextlib.suppress(OSError, ValueError):  # no file, or a damaged one
        sorts = [read_json(folder / SORT_FILE).get("sort")]
    return "val/loss" if "val/loss" in sorts else "speed"


def has_figures(row: dict) -> bool:
    """Return whether a row has a speed or a validation loss."""
    return speed(row) is not None or val_loss(row) is not None


def rank(sort: str, row: dict, tokens_per_sec: float) -> tuple[float, float]:
    """Return a key that is smaller for a better choice. Among equal losses, the fastest is the best."""
    loss = val_loss(row) if sort == "val/loss" else 0.0
    return (math.inf if loss is None else loss, -tokens_per_sec)


def median_speed(rows: list[dict]) -> float:
    """Return the median tokens/s of the runs that have a speed; 0 if none has one."""
    speeds = list(filter(None, map(speed, rows)))
    return statistics.median(speeds) if speeds else 0.0


def comparable_speed(rows: list[dict], bases: list[dict], compared: Ratio | None) -> float:
    """Return the tokens/s by which a table ranks a choice: the baseline's speed times the ratio to the baseline.

    The ratio compares intervals in pairs, so it is more precise than two medians of tokens/s, and may contradict them.
    Without a ratio it is the choice's own speed.
    """
    return compared.value * median_speed(bases) if compared else median_speed(rows)


def shown_run(runs: list[dict]) -> dict:
    """Return the run with the median speed; if no run has a speed, the first run, whose status says why."""
    return median_run([row for row in runs if speed(row)] or runs[:1])


def median_run(rows: list[dict]) -> dict:
    """Return the run with the median speed; with an even number of runs, the slower of the middle two."""
    return sorted(rows, key=speed)[(len(rows) - 1) // 2]


def first_comparable(row: dict, choices: Iterable[list[dict]]) -> list[dict]:
    """Return the runs of the first choice that differs from the row in nothing but its kernels; [] without one."""
    for runs in choices:
        base = next((run for run in runs if "config" in run), None)
        if base and not differences(row, base):
            return runs
    return []
