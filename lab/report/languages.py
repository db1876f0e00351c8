"""The tables of languages in results/README.md: the kernels of each language, and a whole step of each language alone.

`scripts/measure.sh languages` measures them. Languages and their backends are those of kernels/names.py, so a backend
with a new name has a line. The rows of a table must be of one sitting, as those of the rungs (rungs.py).
"""

import re
import shlex
from collections.abc import Callable

from tabulate import tabulate

from kernels.names import OPS, decoding_overrides, languages, training_overrides
from lab.report.describe import time_of
from lab.report.rungs import check_table, lines_cell, newest_runs, title, what_computes
from lab.report.tables import markdown_table, markdown_text, rate_cell
from lab.rows import read_rows
from lab.sweep import table
from lab.sweep.table import Cell, shown_run, speed

MEASURE = "scripts/measure.sh languages"
# The config of a model -> {op: the name in its contract's SHAPES}
SHAPES = {
    "gpt2_124m": dict.fromkeys(["norm", "linear", "attention", "mlp", "loss", "adamw"], "124m") | {"muon": "124m_fc"},
    "smollm2_135m": dict.fromkeys(["rms_norm", "linear", "rope", "attention", "glu", "loss"], "smollm2-135m"),
}
NONE = "none"  # the cell of a language without such a kernel
# Why a language lacks the other ops, under the tables
ABSENT = {
    "Gluon": "only where Triton's kernels keep the tensor cores waiting; elsewhere kernels=gluon takes Triton",
    "Helion": "not written: norm, rope, glu and loss show the language",
    "cuTile": "not written: the ops that it has show the language",
    "TileLang": "not written: the ops that it has show the language",
    "Pallas": "not written: rms_norm shows the language",
    "CuTe DSL": "QuACK has no AdamW",
    "Liger's Triton": "Liger-Kernel has no such kernel",
    "XLA": "not written: the model's ops show the language",
    "CUDA libraries": "PyTorch calls cuBLAS itself for matmuls, and the libraries have no kernel of the other ops",
}
# The file of rows -> {language: the words of its step}, and the columns of its table
STEP_TABLES: dict[str, tuple[Callable, dict[str, Cell]]] = {
    "train": (training_overrides, {name: table.TRAINING[name] for name in ("peak GiB", "first step", "loss")}),
    "generate": (decoding_overrides, {name: table.GENERATION[name] for name in ("peak GiB", "start")}),
}
LEGEND = """\
A cell of kernels has the backend; its milliseconds, forward / both ways; their share of the floor, a copy of the op's
bytes or its bare matmuls (attention and muon have no floor); the largest error against float64; the seconds of the
first call; and the lines of kernel code, 0 if PyTorch or a library has the kernels. If a language has several backends
of an op, the cell shows the fastest. `flash` is in CuTe DSL in version 4, and in CUDA C++ before: the cell says which
ran. Each first call runs in a new process with empty compile caches, from the import of the backend to the end of one
forward and backward. It excludes PyTorch's import and a first matmul. First calls run at the same time: one for every
four cores, at most eight. The inputs of an op are 65,536 tokens, four times as many for norm and rms_norm, and half for
loss and for GPT-2's attention. adamw has all weights, and muon the weights `c_fc` of 12 blocks. "none": the language
has no such kernel here.

In a step, PyTorch computes the ops that the language lacks, and `kernels=gluon` takes Triton for them. A language
without a line has no kernel of such a step. The first step compiles all kernels, and the loss is of the last step."""


PACKAGE = re.compile(r"\S+ \d[\w.+-]*$")  # "jax 0.11.2"


class Notes:
    """The numbered reasons under a table: number(reason) is the same for equal reasons."""

    def __init__(self) -> None:
        self.reasons: dict[str, list[str]] = {}

    def cell(self, status: str, who: str) -> str:
        """Return "unavailable (1)" for the status "unavailable: why" of `who`."""
        word, _, why = status.partition(": ")
        named = self.reasons.setdefault(why or word, [])
        named += [who] if who not in named else []
        return f"{word} ({[*self.reasons].index(why or word) + 1})"

    def text(self) -> str:
        """Return a Markdown list of the reasons, and who has them."""
        items = enumerate(self.reasons.items(), 1)
        return "\n".join(
            f"{n}. {', '.join(f'`{who}`' for who in named)}: {markdown_text(why)}" for n, (why, named) in items
        )


def language_tables(device: str) -> str:
    """Return the tables and a legend. Raises UserError if the newest rows of a table are not of one sitting."""
    kernels = newest_rows(read_rows(device, "kernels"))
    parts, notes, measured = [], Notes(), []
    for model, shapes in SHAPES.items():
        own = {key: row for key, row in kernels.items() if key[:2] in shapes.items()}
        refused = [row for row in own.values() if row["status"] != "ok"]
        measured.append({" ".join(key): row for key, row in own.items()})
        when = next((f", commit {time_of(row)}" for row in own.values() if "env" in row), "")
        parts += [f"Kernels at the shapes of `model={model}`, in bf16{when}:"]
        parts += [kernel_table(shapes, kernels, notes)]
        for kind, ops in (("train", [op for op in OPS if op in shapes]), ("generate", ["decode"])):
            runs = newest_steps(device, kind, model)
            measured.append({words: each[-1] for words, each in runs.items() if each})
            parts += step_parts(kind, model, ops, runs, refused, notes)
    if not any("env" in row for table_rows in measured for row in table_rows.values()):
        return f"Not measured yet: `{MEASURE}`."
    for table_rows in measured:
        check_table(device, "rows of languages", MEASURE, table_rows)
    absent = "\n".join(f"- {markdown_text(language)}: {why}" for language, why in ABSENT.items())
    reasons = f"Why a language has no kernel of some ops:\n\n{absent}"
    return "\n\n".join([*parts, *filter(None, [notes.text()]), LEGEND, reasons, sitting(device, measured)])


def step_parts(
    kind: str, model: str, ops: list[str], runs: dict[str, list[dict]], refused: list[dict], notes: Notes
) -> list[str]:
    """Return a title, the table of the languages that have one of `ops`, and which of their steps had no CUDA graph."""
    overrides, columns = STEP_TABLES[kind]
    rows = [row for each in runs.values() for row in each]
    if row := next(filter(speed, rows), None):
        parts = [f"{title(row)}:"]
    else:
        what = "Training" if kind == "train" else "Decoding"
        parts = [f"{what} `model={model}`: {'no run has a speed' if rows else 'not measured'}."]
    if rows:
        lines = {name: words for name, words in overrides().items() if languages()[name].keys() & {*ops}}
        parts.append(step_table(lines, runs, columns, refused, notes))
        uncaptured = [name for name, words in lines.items() if is_uncaptured(runs[" ".join(words)])]
        if uncaptured:
            parts.append(f"Without a CUDA graph: {', '.join(map(markdown_text, uncaptured))}.")
    return parts


def is_uncaptured(runs: list[dict]) -> bool:
    """Return whether a speed of these runs is that of steps which no CUDA graph replayed."""
    return any(speed(row) and row.get("cuda_graph", "captured") != "captured" for row in runs)


def newest_rows(rows: list[dict]) -> dict[tuple[str, str, str], dict]:
    """Return (op, shape, backend) -> its newest row of scripts.bench_kernels, for the columns and backends of today."""
    columns = {column for shapes in SHAPES.values() for column in shapes.items()}
    own = {(op, impl) for ops in languages().values() for op, names in ops.items() for impl in names}
    shown = [row for row in rows if (row["op"], row["shape"]) in columns and (row["op"], row["impl"]) in own]
    return {(row["op"], row["shape"], row["impl"]): row for row in shown}


def newest_steps(device: str, kind: str, model: str) -> dict[str, list[dict]]:
    """Return the words of a language -> its newest run with this model and the runs of its sitting.

    `kind` is of STEP_TABLES.
    """
    rows = [row for row in read_rows(device, kind) if f"model={model}" in shlex.split(row["command"])]
    return newest_runs(rows, {" ".join(words): None for words in STEP_TABLES[kind][0]().values()})


def kernel_table(shapes: dict[str, str], rows: dict[tuple[str, str, str], dict], notes: Notes) -> str:
    """Return a line for each language, and a column for each op. A language without any of the ops has no line."""
    lines = []
    for language, backends in languages().items():
        if backends.keys() & shapes.keys():
            cells = [kernel_cell(op, shape, backends.get(op, []), rows, notes) for op, shape in shapes.items()]
            lines.append([markdown_text(language), *cells])
    return tabulate(lines, ["language", *shapes], tablefmt="github", disable_numparse=True)


def kernel_cell(op: str, shape: str, names: list[str], rows: dict[tuple[str, str, str], dict], notes: Notes) -> str:
    """Return the figures of the fastest of these backends as Markdown, or why there are none."""
    found = [rows[op, shape, name] for name in names if (op, shape, name) in rows]
    if measured := [row for row in found if row["status"] == "ok"]:
        return figures(min(measured, key=lambda row: row["both/ms"]))
    if found:
        return ", ".join(dict.fromkeys(notes.cell(row["status"], f"{op}={row['impl']}") for row in found))
    return "not measured" if names else NONE


def figures(row: dict) -> str:
    """Return "`triton` 0.51 / **1.87**, 84%<br>3.1e-03, 4.2 s, 632 lines". One time if the op has no gradients."""
    both = f"**{row['both/ms']:.3g}**"
    times = f"{row['forward/ms']:.3g} / {both}" if "backward/ms" in row else both
    share = f", {row['both/of_floor']:.0%}" if row["both/of_floor"] else ""
    first = f"{row['first_call_s']:.2g} s" if row.get("first_call_s") else "no first call"
    error = max(row["error/out"], row["error/gradients"])
    return f"{backend_cell(row)} {times}{share}<br>{error:.1e}, {first}, {row['lines']:,} lines"


def backend_cell(row: dict) -> str:
    """Return the backend, and what it ran in it without versions: "`sdpa` (cudnn)", "`mlp` (cuBLAS matmuls)"."""
    parts = [markdown_text(part) for part in executed_parts(row) if not PACKAGE.match(part)]
    return f"`{row['impl']}`" + (f" ({', '.join(parts)})" if parts else "")


def executed_parts(row: dict) -> list[str]:
    """Return ["fa4", "flash-attn-4 4.0.0b36"] for what the row executed: "flash (fa4, flash-attn-4 4.0.0b36)"."""
    return [part for part in row.get("executed", "").partition(" (")[2].removesuffix(")").split(", ") if part]


def step_table(
    overrides: dict[str, list[str]],
    runs: dict[str, list[dict]],
    columns: dict[str, Cell],
    refused: list[dict],
    notes: Notes,
) -> str:
    """Return a line for each language of `overrides`: what computes, tokens/s, and these columns.

    A job that a backend refuses leaves no row in results/, but `refused` has the benchmark's rows without times.
    """
    lines = []
    for language, words in overrides.items():
        each, why, chosen = runs[" ".join(words)], "not measured", [word.partition("=")[2] for word in words]
        row = shown_run(each) if each else {"status": "not measured"}
        if each and not speed(row):
            why = notes.cell(row["status"] if row["status"] != "ok" else "too short", " ".join(words))
        elif not each and (other := next((other for other in refused if other["impl"] in chosen), None)):
            why = notes.cell(other["status"], f"{other['op']}={other['impl']}")
        cells = [what_computes(row), lines_cell(row), rate_cell(row)] if speed(row) else ["", "", why]
        others = [cell(row) if speed(row) else "" for cell in columns.values()]
        lines.append([language, f"`{' '.join(words)}`", *cells, *others])
    head = ["language", "words", "what computes", "kernel lines", "tokens/s (p20 to p80)", *columns]
    return markdown_table(head, lines)


def sitting(device: str, measured: list[dict[str, dict]]) -> str:
    """Return a sentence: where and when the rows were measured, and in which versions of the packages."""
    rows = [row for each in measured for row in each.values() if "env" in row]
    versions = [f"{name} {row['env'][name]}" for name in ("driver", "torch", "triton") for row in rows]
    versions += [part for row in rows for part in executed_parts(row) if PACKAGE.match(part)]
    text = f"The rows of a table are of one sitting on one {rows[0]['env']['device'].removeprefix('NVIDIA ')}"
    text += f" ({', '.join(dict.fromkeys(versions))}): `{MEASURE}`"
    return f"{markdown_text(text)} ([rows](../results/{device}))."
