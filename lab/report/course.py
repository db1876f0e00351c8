"""The table of course/README.md: each rung, what bounds it, its share of the floor, and its tokens/s in training.

`scripts/measure.sh course` measures both: scripts.course times the rungs, and the sweep configs/sweep/course.yaml
trains with the rungs that compute an op in both directions, except rung 6, whose norm takes rung 5's time.
"""

import ast
from pathlib import Path

from tabulate import tabulate

from common.files import read_text
from lab.bench.rung import rungs
from lab.report.describe import commit
from lab.report.tables import markdown_text
from lab.rows import read_rows
from lab.sweep.table import speed

LIBRARIES = "PyTorch", "torch.compile"
HEAD = ["rung", "bound", "ms", "of the floor", *LIBRARIES]


def course(device: str) -> str:
    """Return the table and a note. A rung that was not measured on this device has empty cells."""
    measured = {line["rung"]: line for line in read_rows(device, "course")}  # the newest of each rung
    runs = {trained_rung(row): row for row in read_rows(f"{device}-course") if speed(row)}
    lines = []
    for path in rungs():
        text, run = read_text(path), runs.get(path.stem)
        rung, _, title = ast.get_docstring(ast.parse(text)).splitlines()[0].removesuffix(".").partition(":")
        cells = share_cells(measured[path.stem]) if path.stem in measured else [""] * len(HEAD[1:])
        tokens = f"**{speed(run):,.0f}** ({speed(run) / speed(runs[None]):.2f}x)" if run and None in runs else ""
        lines.append([f"[{rung}]({path.name}):{markdown_text(title)}", len(text.splitlines()), *cells, tokens])
    table = tabulate(lines, ["rung", "lines", *HEAD[1:], "tokens/s"], tablefmt="github", disable_numparse=True)
    return "\n\n".join(filter(None, [table, source_note(measured, runs)]))


def trained_rung(row: dict) -> str | None:
    """Return the rung with which a row's run trained, such as "05_norm"; None if it was none."""
    chosen = [*row["config"]["kernels"].values(), row["config"]["attn"]["impl"]]
    return next((Path(name).stem for name in chosen if str(name).startswith("course/")), None)


def source_note(measured: dict[str, dict], runs: dict[str | None, dict]) -> str:
    """Return the note under the table: the GPU, the commits and the command; empty without rows."""
    if not measured:
        return ""
    device = {line["env"]["device"].removeprefix("NVIDIA ") for line in measured.values()}
    commits = ", ".join(sorted({commit(line) for line in measured.values()}))
    text = (
        f"On one {' and one '.join(sorted(device))}, commit {commits}: `scripts/measure.sh course`. A share "
        "of the floor is of the rung's last kernel, and of the same formula in PyTorch and under torch.compile."
    )
    if None in runs:
        text += (
            f" Training is of GPT-2 124M in bf16 with this one kernel, beside {speed(runs[None]):,.0f} tokens/s with "
            "PyTorch's (kernels=eager attn=sdpa)."
        )
    return text


def shares(lines: list[dict]) -> str:
    """Return the table of the rungs as text for the terminal; empty without times, as on a CPU."""
    timed = [line for line in lines if "ms" in line["rows"][0]]
    return tabulate([[line["rung"], *share_cells(line)] for line in timed], HEAD, tablefmt="plain") if timed else ""


def share_cells(line: dict) -> list[str]:
    """Return the cells of HEAD without the first: of the rung's last kernel, and the libraries' shares of the floor."""
    rows = {row["kernel"]: row for row in line["rows"]}
    own = [row for row in line["rows"] if row["own"]][-1]
    libraries = [f"{100 * rows[name]['of_floor']:.0f}%" if name in rows else "" for name in LIBRARIES]
    return [own["bound"], f"{own['ms']:.3f}", f"{100 * own['of_floor']:.0f}%", *libraries]
