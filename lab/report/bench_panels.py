"""The figures of the benchmarks: the longest context, kernels under the roofline, attention against T."""

from itertools import cycle
from pathlib import Path

from common.terminal import override, shell_command
from kernels.registry import TRAINING_OPS
from lab.report.colours import BACKEND_COLOURS, CARD, GREY, INK, choice_colours
from lab.report.describe import (
    attention_settings,
    choice_name,
    newest_attention,
    newest_kernels,
    search_settings,
)
from lab.report.plot import Figure, Panel, Point, Series, figure, line, make_origin, wrap
from lab.report.png import draw_figures
from lab.report.presets import preset_of
from lab.report.source import ReportSource
from lab.report.user_command import benchmark_command

# mode -> its name, the symbol of its points, and the side on which their numbers are
MODES = {"train": ("training", "circle", "top"), "generate": ("generation", "circle-open", "bottom")}
# The beginning of a backend's name -> Plotly's name of its symbol, and the same symbol in Unicode
MARKS = {
    "eager": ("circle", "●"),
    "compile": ("square", "■"),
    "triton": ("triangle-up", "▲"),
    "gluon": ("diamond", "◆"),
}
LIBRARY = "cross", "✚"
MARKS_TEXT = ", ".join(f"{character} {name}" for name, (_, character) in (MARKS | {"a library": LIBRARY}).items())
OP_COLOURS = dict(zip(TRAINING_OPS, cycle(BACKEND_COLOURS), strict=False))
TEXT = {
    "context": "Tokens of one sequence: a training step (filled), generation (open).",
    "roofline": f"Forward + backward. The line is the speed of a copy and of a matmul on this machine. {MARKS_TEXT}.",
    "attention": "Milliseconds of forward + backward of one call.",
}
ATTENTION_UNITS = {"both/ms": "ms", "both/peak_gib": "peak GiB"}


def benchmark_panels(source: ReportSource, colours: dict[str, str]) -> list[Panel]:
    kernels, attentions = source.benchmarks["kernels"], source.benchmarks["attention"]
    figures = {
        "context": ("The longest context", context_figure(source, colours), "max_context kernels=triton"),
        "roofline": ("Kernels under the roofline", roofline_figure(kernels), "bench_kernels op=norm"),
        "attention": ("Attention against the context", attention_figure(attentions, colours), "bench_attention"),
    }
    panels = []
    for name, (title, each, script) in figures.items():
        target = "keep=true" if source.from_results else override("out_dir", source.folder / name)
        command = f"python -m scripts.{script} {shell_command(target)}"
        panels.append(Panel(name, title, TEXT[name], command, each))
    return panels


def context_figure(source: ReportSource, colours: dict[str, str]) -> Figure | None:
    """Return the longest contexts on a logarithmic axis."""
    series = []
    for mode, (name, symbol, side) in MODES.items():
        points = []
        for row in (row for row in source.searches if row.get(f"context/max_{mode}")):
            length, choice, settings = row[f"context/max_{mode}"], choice_name(row), search_text(row)
            lines, precision = [f"{length:,} tokens, {name}", choice, settings], row["config"]["precision"]
            origin = make_origin(lines, source.row_command(row), preset_of(row), precision)
            label = "\n".join([*wrap(choice, 80), *wrap(settings, 26)])
            style = {"colour": colours[choice], "symbol": symbol, "ring": 2.5, "text": f"{length:,}"}
            points.append(Point(length, label, origin, **style))
        series.append(Series(name, "markers+text", points, size=13, side=f"{side} center"))
    return figure("tokens", "", series, row=60, octaves=1.5)


def search_text(row: dict) -> str:
    """Return the settings of a search besides its choice."""
    _, precision, _, _, *texts, checkpointing, memory = search_settings(row)
    if checkpointing not in ("", "none"):
        texts.append(f"checkpointing={checkpointing}")
    if memory:
        texts.append(f"{memory} GiB")
    return " ".join(filter(None, [preset_of(row), precision, *texts]))


def roofline_figure(rows: list[dict]) -> Figure | None:
    """Return the newest row of each kernel under the roofline of its machine (Williams et al. 2009). Ops have colours.

    The roofline is the highest FLOP/s that the bandwidth and the matmul allow, over FLOP/byte.
    """
    kernels = list(newest_kernels([row for row in rows if row.get("both/tflops")]).values())
    if not kernels:
        return None
    bandwidth, peak = (max(row[f"ceiling/{key}"] for row in kernels) for key in ("tb_per_s", "tflops"))
    ridge = peak / bandwidth  # below it the bandwidth is the limit, above it the matmul
    points: dict[str, list[Point]] = {}
    for row in kernels:
        settings = {key: row[key] for key in ("op", "shape", "impl", "dtype")}
        command = benchmark_command("bench_kernels", row["op"], settings)
        intensity, symbol = row["both/tflops"] / row["both/tb_per_s"], MARKS.get(row["impl"].split("_")[0], LIBRARY)[0]
        lines = [f"{row['op']} {row['impl']}: {row['both/ms']:.3f} ms", f"{row['shape']}, {row['dtype']}"]
        lines.append(f"{row['both/tflops']:.1f} TFLOP/s, {row['both/tb_per_s']:.2f} TB/s")
        origin = make_origin(lines, command)
        points.setdefault(row["op"], []).append(Point(intensity, row["both/tflops"], origin, symbol=symbol, ring=1))
    intensities = [ridge, *(point.x for each in points.values() for point in each)]
    roof = {x: min(peak, bandwidth * x) for x in sorted({min(intensities) / 3, ridge, max(intensities) * 3})}
    speeds = f"{bandwidth:.3g} TB/s, {peak:.3g} TFLOP/s"
    series = [line(speeds, roof, width=1.5)]
    for op, each in points.items():
        series.append(Series(op, "markers", each, OP_COLOURS.get(op, GREY), size=11, ring_colour=CARD))
    title, log = f"a copy and a matmul: {speeds}; {MARKS_TEXT}", {"x": 1, "y": 1}
    return figure("FLOP/byte, each tensor moved once", "TFLOP/s", series, log=log, title=title)


def attention_figure(rows: list[dict], colours: dict[str, str], key: str = "both/ms") -> Figure | None:
    """Return the milliseconds of attention over T, forward + backward, or another of ATTENTION_UNITS.

    PyTorch's sdpa runs one of the others, so its line lies on the other's: it is dotted, black and drawn last.
    """
    points: dict[str, list[Point]] = {}
    for row in newest_attention(rows).values():
        if row.get("both/ms") and row.get(key):
            lines = [f"{row['impl']}, T = {row['T']:,}: {row['both/ms']:.2f} ms"]
            origin = make_origin(lines, attention_command(row))
            style = {"symbol": "circle-open", "ring": 1.5} if row["impl"] == "sdpa" else {}
            points.setdefault(row["impl"], []).append(Point(row["T"], row[key], origin, **style))
    series = []
    for impl, each in sorted(points.items(), key=lambda item: item[0] == "sdpa"):
        style = (
            {"colour": INK, "dash": "dot", "width": 1.5, "size": 13} if impl == "sdpa" else {"colour": colours[impl]}
        )
        series.append(Series(impl, "lines+markers", each, **{"size": 8, **style}))
    return figure("T", ATTENTION_UNITS[key], series, octaves=0.2, log={"y": 1})


def attention_command(row: dict) -> str:
    settings = {"lengths": [row["T"]], "impl": row["impl"]}
    settings |= {key: value for key, value in attention_settings(row).items() if value}
    if row["batch"] is None:
        settings["batch"] = None  # the default is 1
    return benchmark_command("bench_attention", "attention", settings)


def draw_attention(rows: list[dict], path: Path) -> list[Path]:
    """Draw time and memory of attention over T. Return the files: none without times."""
    colours = choice_colours([], [row["impl"] for row in rows])
    return draw_figures([attention_figure(rows, colours, key) for key in ATTENTION_UNITS], path)


def draw_roofline(rows: list[dict], path: Path) -> list[Path]:
    """Draw the newest row of each kernel under its machine's roofline. Return the files: none without speeds."""
    return draw_figures([roofline_figure(rows)], path)
