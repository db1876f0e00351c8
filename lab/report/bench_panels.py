"""The figures of the benchmarks: the longest context, kernels under the roofline, attention against T."""

import itertools
import re
from itertools import cycle

from common.terminal import override, shell_command
from kernels.registry import TRAINING_OPS
from lab.report.colours import CARD, QUIET
from lab.report.describe import (
    attention_settings,
    choice_name,
    model_size,
    newest_attention,
    newest_kernels,
    search_settings,
)
from lab.report.plot import Figure, Panel, Point, Series, figure, format_values, line, measured_point, wrap
from lab.report.source import ReportSource
from lab.rerun import rerun_command
from lab.rows import read_rows

# mode -> its name, the symbol of its points, and the side on which their numbers are
MODES = {"train": ("training", "circle", "top"), "generate": ("generation", "circle-open", "bottom")}
PRECISIONS = {"bfloat16": ["amp", "bf16", "fp8"], "float16": [], "float32": ["fp32"]}  # dtype -> precisions that use it
SYMBOLS = ["circle", "triangle-up", "square", "diamond", "star", "pentagon", "hexagon", "cross"]  # Plotly's names
CHARACTERS = "●▲■◆★⬟⬢✚"  # the same symbols in Unicode
MARK_OF_OP = dict(zip(TRAINING_OPS, cycle(zip(SYMBOLS, CHARACTERS, strict=True)), strict=False))
OTHER_MARK = SYMBOLS[0], CHARACTERS[0]  # of an op that kernels/ no longer has
SYMBOLS_TEXT = ", ".join(f"{character} {op}" for op, (_, character) in MARK_OF_OP.items())
TEXT = {
    "context": "Tokens of one sequence: a training step (filled), generation (open). Crosses: nanoGPT on an H200.",
    "roofline": f"Forward + backward. The line is the speed of a copy and of a matmul on this machine. {SYMBOLS_TEXT}.",
    "attention": "Milliseconds of forward + backward of one call.",
}
ATTENTION_UNITS = {"both/ms": "ms", "both/peak_gib": "peak GiB"}


def benchmark_panels(source: ReportSource, colours: dict[str, str]) -> list[Panel]:
    search, op, attention = "max_context kernels=triton", "bench_kernels op=norm", "bench_attention"
    if source.on_cpu:
        search, op = "max_context model=tiny memory_gib=0.1", f"{op} shape=768 dtype=float32"
        attention = f"{attention} lengths='[64,128]' dtype=float32"
    kernels, attentions = source.benchmarks["kernels"], source.benchmarks["attention"]
    figures = {
        "context": ("The longest context", context_figure(source.searches, colours), search),
        "roofline": ("Kernels under the roofline", roofline_figure(kernels, colours), op),
        "attention": ("Attention against the context", attention_figure(attentions, colours), attention),
    }
    panels = []
    for name, (title, each, script) in figures.items():
        target = "keep=true" if source.from_results else override("out_dir", source.folder / name)
        command = f"python -m scripts.{script} {shell_command(target)}"
        panels.append(Panel(name, title, TEXT[name], command, each))
    return panels


def context_figure(searches: list[dict], colours: dict[str, str]) -> Figure | None:
    """Return the longest contexts on a logarithmic axis; on an H200 also nanoGPT's."""
    series = []
    for mode, (name, symbol, side) in MODES.items():
        points = []
        for row in (row for row in searches if row.get(f"context/max_{mode}")):
            length, filters = row[f"context/max_{mode}"], (model_size(row), [row["config"]["precision"]])
            style = {"colour": colours[choice_name(row["config"])], "symbol": symbol, "ring": 2.5}
            style["text"] = f"{length:,}"
            lines, label = search_hover(mode, row), search_label(row, searches)
            points.append(measured_point(length, label, lines, rerun_command(row), *filters, **style))
        series.append(Series(name, "markers+text", points, size=13, side=f"{side} center"))
    if any("H200" in row["env"]["device"] and model_size(row) == "124M" for row in searches):
        points = []
        for row in read_rows("h200", "peers"):
            if (row["measure"], row["system"]) == ("context", "nanoGPT"):
                length, how = row["max_train"], row["how"].partition(";")[0]
                lines = [f"nanoGPT, {how}: {length:,} tokens", "124M on one H200, batch 1, a training step"]
                style = {"symbol": "x", "text": f"{length:,}"}
                points.append(measured_point(length, f"nanoGPT\n{how}", lines, None, "124M", [], **style))
        series.append(Series("nanoGPT", "markers+text", points, QUIET, size=11, side="top center"))
    return figure("tokens", "", series, row=60, octaves=1.5)


def search_label(row: dict, rows: list[dict]) -> str:
    """Return a search's label on the axis. It has the memory only if that varies among the rows."""
    varies = len({search_settings(other)[-1] for other in rows}) > 1
    settings = search_texts(row) if varies else search_texts(row)[:-1]
    return "\n".join([*wrap(choice_name(row["config"]), 80), *wrap(" ".join(filter(None, settings)), 26)])


def search_texts(row: dict) -> list[str]:
    """Return the settings of a search besides its choice, the memory last."""
    model, precision, _, _, positions, checkpointing, memory = search_settings(row)
    checkpoints = "" if checkpointing in ("", "none") else f"checkpointing={checkpointing}"
    return [model, precision, positions, checkpoints, memory and f"{memory} GiB"]


def search_hover(mode: str, row: dict) -> list[str]:
    work = "a training step" if mode == "train" else "a prefill, and 64 tokens more"
    lines = [f"{row[f'context/max_{mode}']:,} tokens, {work}", choice_name(row["config"])]
    lines.append(" · ".join(filter(None, search_texts(row))))
    keys = {"{:.3g} s": "seconds", "peak {:.1f} GiB": "peak_gib"}
    keys |= {"error of the predicted peak {:+.1%}": "prediction_error"}
    return lines + format_values({template: row.get(f"context/{mode}/{key}") for template, key in keys.items()})


def roofline_figure(rows: list[dict], colours: dict[str, str]) -> Figure | None:
    """Return the newest row of each kernel under the roofline of its machine (Williams et al. 2009).

    The roofline is the highest FLOP/s that the bandwidth and the matmul allow, over FLOP/byte.
    """
    kernels = list(newest_kernels([row for row in rows if row.get("both/tflops")]).values())
    if not kernels:
        return None
    bandwidth, peak = (max(row[f"ceiling/{key}"] for row in kernels) for key in ("tb_per_s", "tflops"))
    ridge = peak / bandwidth  # below it the bandwidth is the limit, above it the matmul
    points: dict[str, list[Point]] = {}
    for row in kernels:
        model = re.match(r"\d+m(?=-|$)", row["shape"])  # a shape such as 124m-fp32-residual names a model
        filters = model[0].upper() if model else "", PRECISIONS[row["dtype"]]
        words = (override(key, row[key]) for key in ("op", "shape", "impl", "dtype"))
        command = rerun_command({"command": shell_command("python", "-m", "scripts.bench_kernels", *words)})
        place, style = (row["both/tflops"] / row["both/tb_per_s"], row["both/tflops"]), {"ring": 1}
        style["symbol"] = MARK_OF_OP.get(row["op"], OTHER_MARK)[0]
        point = measured_point(*place, kernel_hover(row), command, *filters, **style)
        points.setdefault(row["impl"], []).append(point)
    intensities = [ridge, *(point.x for each in points.values() for point in each)]
    roof = {x: min(peak, bandwidth * x) for x in sorted({min(intensities) / 3, ridge, max(intensities) * 3})}
    speeds = f"{bandwidth:.3g} TB/s, {peak:.3g} TFLOP/s"
    series = [line(speeds, roof, width=1.5)]
    for impl, each in points.items():
        series.append(Series(impl, "markers", each, colours[impl], size=11, ring_colour=CARD))
    title, log = f"a copy and a matmul: {speeds}; {SYMBOLS_TEXT}", {"x": 1, "y": 1}
    return figure("FLOP/byte, each tensor moved once", "TFLOP/s", series, log=log, title=title)


def kernel_hover(row: dict) -> list[str]:
    ms, low, high = (row[f"both/ms{quantile}"] for quantile in ("", "/p20", "/p80"))
    return [
        f"{row['op']} {row['impl']}: {ms:.3f} ms ({low:.3f} to {high:.3f})",
        f"{row['shape']}, {row['dtype']}, forward + backward",
        f"{row['both/tflops']:.1f} TFLOP/s, {row['both/tb_per_s']:.2f} TB/s",
        *format_values({"{:.1%} of the floor": row.get("both/of_floor")}),
        f"error {max(row['error/out'], row['error/gradients']):.1e}",
    ]


def attention_figure(rows: list[dict], colours: dict[str, str], key: str = "both/ms") -> Figure | None:
    """Return the milliseconds of attention over T, forward + backward, or another of ATTENTION_UNITS."""
    points: dict[str, list[Point]] = {}
    for row in newest_attention(rows).values():
        if row.get("both/ms") and row.get(key):
            lines = [f"{row['impl']}, T = {row['T']:,}: {row['both/ms']:.2f} ms"]
            lines += format_values({"{:.2f} GiB besides the inputs": row.get("both/peak_gib")})
            point = measured_point(row["T"], row[key], lines, attention_command(row), "", PRECISIONS[row["dtype"]])
            points.setdefault(row["impl"], []).append(point)
    series = [Series(impl, "lines+markers", each, colours[impl], size=8) for impl, each in points.items()]
    return figure("T", ATTENTION_UNITS[key], series, octaves=0.2, log={"y": 1})


def attention_command(row: dict) -> str:
    settings = {"lengths": [row["T"]], "impl": row["impl"]}
    settings |= {key: value for key, value in attention_settings(row).items() if value}
    if row["batch"] is None:
        settings["batch"] = None  # the default is 1
    words = itertools.starmap(override, settings.items())
    return rerun_command({"command": shell_command("python", "-m", "scripts.bench_attention", *words)})
