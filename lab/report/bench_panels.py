"""The panels of the benchmarks: the longest context, kernels under the roofline, attention against T.

Each figure comes with its `Entries`: page.js filters its points and copies its commands by them.
"""

import itertools
import math
import re
import textwrap
from itertools import cycle

from kernels.registry import TRAINING_OPS
from lab.report.colours import CARD, INK, QUIET
from lab.report.describe import (
    attention_settings,
    model_size,
    newest_attention,
    newest_kernels,
    newest_searches,
    search_settings,
)
from lab.report.plot import PREDICTION_ERROR, Panel, escape, figure, format_values, hover_text, scatter, wrap
from lab.report.source import ReportSource
from lab.rerun import rerun_command
from lab.rows import read_rows
from terminal import override, shell_command

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
Entries = dict[str, dict]  # id -> page_entry(): the command measures the point again


def benchmark_panels(source: ReportSource, colours: dict[str, str]) -> tuple[list[Panel], Entries]:
    search, op, attention = "max_context kernels=triton", "bench_kernels op=norm", "bench_attention"
    if source.on_cpu:
        search, op = "max_context model=tiny memory_gib=0.1", f"{op} shape=768 dtype=float32"
        attention = f"{attention} lengths='[64,128]' dtype=float32"
    figures = {
        "context": ("The longest context", "context", context_figure, search),
        "roofline": ("Kernels under the roofline", "kernels", roofline_figure, op),
        "attention": ("Attention against the context", "attention", attention_figure, attention),
    }
    panels, entries = [], {}
    for name, (title, benchmark, draw, script) in figures.items():
        target = "keep=true" if source.from_results else override("out_dir", source.folder / name)
        drawing, points = draw(source.benchmarks[benchmark], colours)
        panels.append(Panel(name, title, TEXT[name], f"python -m scripts.{script} {shell_command(target)}", drawing))
        entries |= points
    return panels, entries


def page_entry(model: str, precisions: list[str], command: str | None) -> dict:
    """Return an entry. The command is "" if a row has none that may run again, and None for a reference line."""
    return {"model": model, "precisions": precisions, "command": command}


def context_figure(rows: list[dict], colours: dict[str, str]) -> tuple[dict | None, Entries]:
    """Draw the longest contexts on a logarithmic axis; on an H200 also nanoGPT's."""
    searches = {f"context{number}": row for number, row in enumerate(newest_searches(rows))}
    if not searches:
        return None, {}
    entries = {
        id: page_entry(model_size(row), [row["config"]["precision"]], rerun_command(row))
        for id, row in searches.items()
    }
    traces = []
    for mode, (name, symbol, side) in MODES.items():
        points = {id: row for id, row in searches.items() if row.get(f"context/max_{mode}")}
        if points:
            fills = [colours[search_settings(row)[0]] for row in points.values()]
            lengths = [row[f"context/max_{mode}"] for row in points.values()]
            labels = [search_label(row, list(searches.values())) for row in points.values()]
            trace = length_points(name, lengths, labels, f"{side} center")
            trace["marker"] = {"size": 13, "color": fills, "symbol": symbol, "line": {"width": 2.5, "color": fills}}
            traces.append(trace | {"customdata": [[id, search_hover(mode, row)] for id, row in points.items()]})
    if any("H200" in row["env"]["device"] and model_size(row) == "124M" for row in searches.values()):
        lengths = nanogpt_lengths()
        traces.append(nanogpt_points(lengths))
        entries |= {name: page_entry("124M", [], None) for name in lengths}
    drawing = figure(traces, "tokens", row_height=60)
    drawing["layout"]["xaxis"] |= {"type": "log", "rangemode": "normal", **octave_ticks(traces, room=1.5)}
    return drawing, entries


def search_label(row: dict, rows: list[dict]) -> str:
    """Return a search's label on the axis. It has the memory only if that varies among the rows."""
    choice, *settings, memory = search_settings(row)
    if len({search_settings(other)[-1] for other in rows}) > 1:
        settings.append(memory)
    return "<br>".join(map(escape, [*wrap(choice, 80), *textwrap.wrap(" ".join(filter(None, settings)), 26)]))


def search_hover(mode: str, row: dict) -> str:
    choice, *settings = search_settings(row)
    work = "a training step" if mode == "train" else "a prefill, and 64 tokens more"
    lines = [f"{row[f'context/max_{mode}']:,} tokens, {work}", choice, " · ".join(filter(None, settings))]
    keys = {"{:.3g} s": "seconds", "peak {:.1f} GiB": "peak_gib", PREDICTION_ERROR: "prediction_error"}
    lines += format_values({template: row.get(f"context/{mode}/{key}") for template, key in keys.items()})
    return hover_text(lines, rerun_command(row))


def length_points(name: str, lengths: list[int], labels: list[str], textposition: str) -> dict:
    text = [f"{length:,}" for length in lengths]
    place = {"x": lengths, "y": labels, "text": text, "textposition": textposition}
    return scatter("markers+text", name=name, cliponaxis=False, **place)


def nanogpt_lengths() -> dict[str, int]:
    """Return "nanoGPT, HOW" -> the longest T of a training step of 124M on one H200 at batch 1."""
    rows = [row for row in read_rows("h200", "peers") if (row["measure"], row["system"]) == ("context", "nanoGPT")]
    return {f"nanoGPT, {row['how'].partition(';')[0]}": row["max_train"] for row in rows}


def nanogpt_points(longest: dict[str, int]) -> dict:
    labels = [name.replace(", ", "<br>", 1) for name in longest]
    trace = length_points("nanoGPT", list(longest.values()), labels, "top center")
    trace["marker"] = {"size": 11, "color": QUIET, "symbol": "x-thin", "line": {"width": 2.5, "color": QUIET}}
    setting = "124M on one H200, batch 1, a training step"
    hovers = [[name, hover_text([f"{name}: {length:,} tokens", setting], "")] for name, length in longest.items()]
    return trace | {"customdata": hovers}


def octave_ticks(traces: list[dict], room: float = 0.2) -> dict:
    """Return a logarithmic axis: at most 7 ticks, at powers of two, and `room` octaves of space beside the points."""
    lengths = [length for trace in traces for length in trace["x"]]
    low, high = min(lengths) / 2**room, max(lengths) * 2**room
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    powers = powers[:: 1 + len(powers) // 6]
    ticks = {"tickmode": "array", "tickvals": [2**power for power in powers], "tickangle": 0}
    return {
        **ticks,
        "ticktext": [short_number(2**power) for power in powers],
        "range": [math.log10(low), math.log10(high)],
    }


def short_number(number: int) -> str:
    """Return 64 as "64", 2^17 as "128K", 2^20 as "1M"."""
    if number >= 2**20:
        return f"{number >> 20}M"
    return f"{number >> 10}K" if number >= 2**10 else str(number)


def roofline_figure(rows: list[dict], colours: dict[str, str]) -> tuple[dict | None, Entries]:
    """Draw the newest row of each kernel under the roofline of its machine (Williams et al. 2009)."""
    newest = newest_kernels([row for row in rows if row.get("both/tflops")]).values()
    points = {f"kernel{number}": row for number, row in enumerate(newest)}
    if not points:
        return None, {}
    bandwidth, peak = (max(row[f"ceiling/{key}"] for row in newest) for key in ("tb_per_s", "tflops"))
    ridge = peak / bandwidth  # below it the bandwidth is the limit, above it the matmul
    intensities = [*map(intensity, newest), ridge]
    roof = sorted({min(intensities) / 3, ridge, max(intensities) * 3})
    heights = [min(peak, bandwidth * x) for x in roof]
    name, line = f"{bandwidth:.3g} TB/s, {peak:.3g} TFLOP/s", {"color": INK, "width": 1.5}
    traces = [scatter("lines", name=name, x=roof, y=heights, line=line, hoverinfo="skip")]
    for impl in dict.fromkeys(row["impl"] for row in newest):
        impl_points = {id: row for id, row in points.items() if row["impl"] == impl}
        symbols = [MARK_OF_OP.get(row["op"], OTHER_MARK)[0] for row in impl_points.values()]
        traces.append(
            scatter(
                "markers",
                name=escape(impl),
                x=list(map(intensity, impl_points.values())),
                y=[row["both/tflops"] for row in impl_points.values()],
                marker={"color": colours[impl], "size": 11, "symbol": symbols, "line": {"color": CARD, "width": 1}},
                customdata=[[id, kernel_hover(row)] for id, row in impl_points.items()],
            )
        )
    drawing = figure(traces, "FLOP/byte, each tensor moved once", "TFLOP/s")
    for axis in ("xaxis", "yaxis"):
        drawing["layout"][axis] |= {"type": "log", "dtick": 1}
    return drawing, {id: kernel_entry(row) for id, row in points.items()}


def intensity(row: dict) -> float:
    """Return the kernel's FLOP/byte."""
    return row["both/tflops"] / row["both/tb_per_s"]


def kernel_entry(row: dict) -> dict:
    """Return the entry of a kernel. A shape such as 124m-fp32-residual names a model, 124M; other shapes name none."""
    model = re.match(r"\d+m(?=-|$)", row["shape"])
    return page_entry(model[0].upper() if model else "", PRECISIONS[row["dtype"]], kernel_command(row))


def kernel_command(row: dict) -> str:
    words = (override(key, row[key]) for key in ("op", "shape", "impl", "dtype"))
    return rerun_command({"command": shell_command("python", "-m", "scripts.bench_kernels", *words)})


def kernel_hover(row: dict) -> str:
    ms, low, high = (row[f"both/ms{quantile}"] for quantile in ("", "/p20", "/p80"))
    lines = [
        f"{row['op']} {row['impl']}: {ms:.3f} ms ({low:.3f} to {high:.3f})",
        f"{row['shape']}, {row['dtype']}, forward + backward",
        f"{row['both/tflops']:.1f} TFLOP/s, {row['both/tb_per_s']:.2f} TB/s",
        *format_values({"{:.1%} of the floor": row.get("both/of_floor")}),
        f"error {max(row['error/out'], row['error/gradients']):.1e}",
    ]
    return hover_text(lines, kernel_command(row))


def attention_figure(rows: list[dict], colours: dict[str, str]) -> tuple[dict | None, Entries]:
    """Draw the milliseconds of attention over T, forward + backward."""
    points = [row for row in newest_attention(rows).values() if row.get("both/ms")]
    if not points:
        return None, {}
    entries, traces = {}, []
    for impl in dict.fromkeys(row["impl"] for row in points):
        impl_rows = [row for row in points if row["impl"] == impl]
        hovers = []
        for row in impl_rows:
            id, command = f"attention{len(entries)}", attention_command(row)
            lines = [f"{impl}, T = {row['T']:,}: {row['both/ms']:.2f} ms"]
            lines += format_values({"{:.2f} GiB besides the inputs": row.get("both/peak_gib")})
            hovers.append([id, hover_text(lines, command)])
            entries[id] = page_entry("", PRECISIONS[row["dtype"]], command)
        x, y, colour = [row["T"] for row in impl_rows], [row["both/ms"] for row in impl_rows], colours[impl]
        style = {"line": {"color": colour, "width": 2}, "marker": {"size": 8, "color": colour}}
        traces.append(scatter("lines+markers", name=escape(impl), x=x, y=y, customdata=hovers, **style))
    drawing = figure(traces, "T", "ms")
    drawing["layout"]["yaxis"] |= {"type": "log", "dtick": 1}
    drawing["layout"]["xaxis"] |= {"type": "log", **octave_ticks(traces)}
    return drawing, entries


def attention_command(row: dict) -> str:
    settings = {"lengths": [row["T"]], "impl": row["impl"]}
    settings |= {key: value for key, value in attention_settings(row).items() if value}
    if row["batch"] is None:
        settings["batch"] = None  # the default is 1
    words = itertools.starmap(override, settings.items())
    return rerun_command({"command": shell_command("python", "-m", "scripts.bench_attention", *words)})
