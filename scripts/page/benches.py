"""The panels of the other measurements: the longest context, kernels under their roof, attention against T.

A figure comes with `Known`, what it shows by id, for page.js to filter by and copy from.
"""

import math
import re
import textwrap
from html import escape

from scripts.page.choices import Source, again, millions, name
from scripts.page.colours import CARD, INK, QUIET
from scripts.page.panels import OFF, SAID, Panel, axes, known, said
from scripts.report import limits, newest_context

NANOGPT = {  # the longest T of a training step of 124M on one H200, at batch 1
    "nanoGPT, eager": 131_072,
    "nanoGPT, torch.compile": 196_608,
    "nanoGPT, Liger's loss, checkpoints": 1_900_000,  # by its bytes a token
}
WAYS = {"train": ("training", "circle", "top"), "generate": ("generation", "circle-open", "bottom")}
FACTS = {"{:.3g} s": "seconds", "{:.1f} GiB at the peak": "peak_gib", OFF: "prediction_error"}
PRECISIONS = {"bfloat16": ["amp", "bf16"], "float16": [], "float32": ["fp32"]}  # whose kernels run in a dtype
SYMBOLS = {"norm": "circle", "mlp": "square", "loss": "diamond", "attention": "triangle-up"}
TEXT = {
    "context": "Tokens of one sequence in a training step (filled) and in generation (open); nanoGPT's, on an H200.",
    "roofline": "Both ways, under what a copy and a matmul reached here. ● norm, ■ mlp, ◆ loss, ▲ attention.",
    "attention": "Forward and backward of one call.",
}
Known = dict[str, dict]


def benches(source: Source, colours: dict[str, str], subjects: Known) -> list[Panel]:
    """What they show goes into `subjects`."""
    figures = {
        "context": ("The longest context", "max_context kernels=triton", context),
        "roofline": ("Kernels under the roof", "bench_kernels op=norm", roofline),
        "attention": ("Attention against the context", "bench_attention", attention),
    }
    found = []
    for key, (title, script, draw) in figures.items():
        where = "keep=true" if source.kept else f"out_dir={source.folder}/{key}"
        rows = source.benches["kernels" if key == "roofline" else key]
        figure, shown = draw(rows, colours) if rows else (None, {})
        subjects |= shown
        found.append(Panel(key, title, TEXT[key], f"python -m scripts.{script} {where}", figure))
    return found


def contexts(rows: list[dict]) -> list[dict]:
    """The newest row of each choice that found a length, the longest first."""
    found = {described(row): row for row in rows if row.get("context/max_train") or row.get("context/max_generate")}
    return sorted(found.values(), key=lambda row: -(row.get("context/max_train") or 0))


def described(row: dict) -> tuple[str, ...]:
    """What a search for the longest context was made with: its kernels, and settings."""
    config, model = row["config"], row["config"]["model"]
    checkpoints = {"block": "a checkpoint a block", "host": "a checkpoint a block, on the host"}
    memory = f"{row['memory_gib']:.4g} GiB" if row.get("memory_gib") else ""
    kept = checkpoints.get(model.get("checkpointing"), "") + ", attention kept" * model.get("keep_attention", False)
    return name(config), millions(row), config["precision"], model.get("pos", ""), limits(row), kept, memory


def context(rows: list[dict], colours: dict[str, str]) -> tuple[dict | None, Known]:
    """Dots over a logarithmic axis, and nanoGPT's where the machine is the one that these are of."""
    shown, kept = {}, contexts(rows)
    for number, row in enumerate(kept):
        subject = {
            "model": millions(row),
            "precisions": [row["config"]["precision"]],
            "command": again(row),
        }
        shown[f"context{number}"] = subject
    traces = []
    for way, (label, symbol, side) in WAYS.items():
        mine = {key: row for key, row in zip(shown, kept, strict=True) if row.get(f"context/max_{way}")}
        fills = [colours[described(row)[0]] for row in mine.values()]
        trace = {"type": "scatter", "mode": "markers+text", "name": label, "textposition": f"{side} center"}
        trace |= {"hovertemplate": SAID, "cliponaxis": False}
        trace["x"] = [row[f"context/max_{way}"] for row in mine.values()]
        trace["y"] = [searched(row, kept) for row in mine.values()]
        trace["text"] = [f"{length:,}" for length in trace["x"]]
        trace["marker"] = {"size": 13, "color": fills, "symbol": symbol, "line": {"width": 2.5, "color": fills}}
        trace["customdata"] = [[key, found(way, row)] for key, row in mine.items()]
        traces += [trace] * bool(mine)
    if not traces:
        return None, {}
    if any("H200" in row["env"]["device"] and millions(row) == "124M" for row in kept):
        traces.append(nanogpt())
        shown |= {who: {"model": "124M", "precisions": [], "command": ""} for who in NANOGPT}
    frame = axes("tokens", row=60)
    frame["layout"]["xaxis"] |= {"type": "log", "rangemode": "normal"} | octaves(traces, room=1.5)
    return {"data": traces, **frame}, shown


def searched(row: dict, rows: list[dict]) -> str:
    """On the axis; with the memory where that varies."""
    kernels, *settings, memory = described(row)
    settings += [memory] * (len({described(each)[-1] for each in rows}) > 1)
    return "<br>".join(map(escape, [kernels, *textwrap.wrap(" ".join(filter(None, settings)), 26)]))


def found(way: str, row: dict) -> str:
    """What is said of a length."""
    kernels, *settings = described(row)
    what = "a training step" if way == "train" else "prefilled, and 64 more"
    lines = [f"{row[f'context/max_{way}']:,} tokens, {what}", kernels, " · ".join(filter(None, settings))]
    lines += known({told: row.get(f"context/{way}/{key}") for told, key in FACTS.items()})
    return said(lines, again(row))


def nanogpt() -> dict:
    """The trace of its lengths."""
    trace = {"type": "scatter", "mode": "markers+text", "name": "nanoGPT", "hovertemplate": SAID, "cliponaxis": False}
    trace |= {"x": list(NANOGPT.values()), "y": [who.replace(", ", "<br>", 1) for who in NANOGPT]}
    trace |= {"text": [f"{length:,}" for length in NANOGPT.values()], "textposition": "top center"}
    trace["marker"] = {"size": 11, "color": QUIET, "symbol": "x-thin", "line": {"width": 2.5, "color": QUIET}}
    where = "124M on one H200, batch 1, a training step"
    told = {who: said([f"{who}: {length:,} tokens", where], "") for who, length in NANOGPT.items()}
    return trace | {"customdata": list(map(list, told.items()))}


def octaves(traces: list[dict], room: float = 0.2) -> dict:
    """Ticks at powers of two, 128K and 1M, and `room` octaves to either side."""
    lengths = [length for trace in traces for length in trace["x"]]
    low, high = min(lengths).bit_length() - 2, max(lengths).bit_length() + 1
    inside = [p for p in range(low, high + 1) if min(lengths) / 2**room <= 2**p <= max(lengths) * 2**room]
    powers = inside[:: 1 + len(inside) // 6]
    text = [f"{2**p >> 20}M" if p >= 20 else f"{2**p >> 10}K" if p >= 10 else str(2**p) for p in powers]
    ends = [math.log10(min(lengths) / 2**room), math.log10(max(lengths) * 2**room)]
    return {"tickvals": [2**p for p in powers], "ticktext": text, "tickmode": "array", "tickangle": 0, "range": ends}


def roofline(rows: list[dict], colours: dict[str, str]) -> tuple[dict | None, Known]:
    """The newest rows of kernels under the roof of their machine (Williams et al. 2009)."""
    newest = {(row["op"], row["dtype"], row["shape"], row["impl"]): row for row in rows if row.get("both/tflops")}
    shown = {f"kernel{number}": row for number, row in enumerate(newest.values())}
    if not shown:
        return None, {}
    bandwidth, peak = (max(row[f"ceiling/{key}"] for row in shown.values()) for key in ("tb_per_s", "tflops"))
    at = [*map(intensity, shown.values()), peak / bandwidth]
    roof = sorted({min(at) / 3, peak / bandwidth, max(at) * 3})
    trace = {"type": "scatter", "mode": "lines", "line": {"color": INK, "width": 1.5}, "hoverinfo": "skip"}
    trace |= {"x": roof, "y": [min(peak, bandwidth * x) for x in roof]}
    traces = [trace | {"name": f"{bandwidth:.3g} TB/s, {peak:.3g} TFLOP/s"}]
    for impl in dict.fromkeys(row["impl"] for row in shown.values()):
        mine = {key: row for key, row in shown.items() if row["impl"] == impl}
        trace = {"type": "scatter", "mode": "markers", "name": escape(impl), "hovertemplate": SAID}
        trace |= {"x": list(map(intensity, mine.values())), "y": [row["both/tflops"] for row in mine.values()]}
        symbols = [SYMBOLS.get(row["op"], "circle") for row in mine.values()]
        trace["marker"] = {"color": colours[impl], "size": 11, "symbol": symbols, "line": {"color": CARD, "width": 1}}
        traces.append(trace | {"customdata": [[key, timed(row)] for key, row in mine.items()]})
    frame = axes("FLOP a byte, every tensor moved once", "TFLOP/s")
    for axis in ("xaxis", "yaxis"):
        frame["layout"][axis] |= {"type": "log", "dtick": 1}
    return {"data": traces, **frame}, {key: kernel(row) for key, row in shown.items()}


def intensity(row: dict) -> float:
    return row["both/tflops"] / row["both/tb_per_s"]


def kernel(row: dict) -> dict:
    """Of which model and precisions, and how to measure it again."""
    model = re.match(r"\d+m(?=-|$)", row["shape"])  # 124m, 124m-fp32-residual; others are of no model
    command = "python -m scripts.bench_kernels " + " ".join(
        f"{key}={row[key]}" for key in ("op", "shape", "impl", "dtype")
    )
    return {"model": model[0].upper() if model else "", "precisions": PRECISIONS[row["dtype"]], "command": command}


def timed(row: dict) -> str:
    """What is said of a kernel."""
    ms, low, high = (row[f"both/ms{p}"] for p in ("", "/p20", "/p80"))
    return said(
        [
            f"{row['op']} {row['impl']}: {ms:.3f} ms ({low:.3f} to {high:.3f})",
            f"{row['shape']}, {row['dtype']}, forward and backward",
            f"{row['both/tflops']:.1f} TFLOP/s, {row['both/tb_per_s']:.2f} TB/s",
            *known({"{:.1%} of the floor": row.get("both/of_floor")}),
            f"error {max(row['error/out'], row['error/gradients']):.1e}",
        ],
        kernel(row)["command"],
    )


def attention(rows: list[dict], colours: dict[str, str]) -> tuple[dict | None, Known]:
    """Milliseconds over T, both ways."""
    newest = [row for row in newest_context(rows).values() if row.get("both/ms")]
    shown, traces = {}, []
    for impl in dict.fromkeys(row["impl"] for row in newest):
        mine = [row for row in newest if row["impl"] == impl]
        trace = {"type": "scatter", "mode": "lines+markers", "name": escape(impl), "hovertemplate": SAID}
        trace |= {"x": [row["T"] for row in mine], "y": [row["both/ms"] for row in mine], "customdata": []}
        trace |= {"line": {"color": colours[impl], "width": 2}, "marker": {"size": 8, "color": colours[impl]}}
        for row in mine:
            words = [f"{key}={row[key]}" for key in ("impl", "batch", "heads", "head_dim", "dtype") if row[key]]
            command = " ".join(["python -m scripts.bench_attention", f"lengths=[{row['T']}]", *words])
            lines = [f"{impl}, T = {row['T']:,}: {row['both/ms']:.2f} ms"]
            lines += known({"{:.2f} GiB besides the inputs": row.get("both/peak_gib")})
            trace["customdata"].append([f"attention{len(shown)}", said(lines, command)])
            shown[f"attention{len(shown)}"] = {"model": "", "precisions": PRECISIONS[row["dtype"]], "command": command}
        traces.append(trace)
    if not traces:
        return None, {}
    frame = axes("T", "ms")
    frame["layout"]["yaxis"] |= {"type": "log", "dtick": 1}
    frame["layout"]["xaxis"] |= {"type": "log"} | octaves(traces)
    return {"data": traces, **frame}, shown
