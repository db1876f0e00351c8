"""The panels of the other measurements: the longest context, kernels under their roof, attention against the context."""

import math
import re
import textwrap
from html import escape

from scripts.page.choices import Source, millions, name
from scripts.page.colours import INK, QUIET
from scripts.page.panels import OFF, SAID, Panel, axes, known, said
from scripts.report import newest_context

NANOGPT = {  # the longest T of a training step at batch 1 on one H200: shared/TARGETS.md
    "nanoGPT, eager": 131_072,
    "nanoGPT, torch.compile": 196_608,
    "nanoGPT, Liger's loss, checkpoints": 1_900_000,
}
PRECISIONS = {"bfloat16": ["amp", "bf16"], "float16": [], "float32": ["fp32"]}  # whose kernels run in a dtype
FACTS = {"{:.3g} s": "seconds", "{:.1f} GiB at the peak": "peak_gib", OFF: "prediction_error"}
SYMBOLS = {"norm": "circle", "mlp": "square", "loss": "diamond", "attention": "triangle-up"}


def benches(source: Source, colours: dict[str, str], subjects: dict[str, dict]) -> list[Panel]:
    """And what they show, by id, into `subjects`."""
    out = (lambda what: " keep=true") if source.kept else (lambda what: f" out_dir={source.folder}/{what}")
    told = [
        ("context", "The longest context", "Tokens of one sequence that train (filled) or are generated (open); nanoGPT's as measured on an H200.",
         f"python -m scripts.max_context kernels=triton attn=sdpa{out('context')}"),
        ("roofline", "Kernels under the roof", "Forward and backward, under what a copy and a large matmul reached here. ● norm, ■ mlp, ◆ loss, ▲ attention.",
         f"python -m scripts.bench_kernels op=norm{out('kernels-norm')}"),
        ("attention", "Attention against the context", "Forward and backward of one call.",
         f"python -m scripts.bench_attention{out('attention')}"),
    ]  # fmt: skip
    figures = {
        "context": context(source.benches["context"], colours, subjects),
        "roofline": roofline(source.benches["kernels"], colours, subjects),
        "attention": attention(source.benches["attention"], colours, subjects),
    }
    return [Panel(key, title, text, command, figures[key]) for key, title, text, command in told]


def contexts(rows: list[dict]) -> list[dict]:
    """The newest row of each choice that found a length, the longest first."""
    found = {}
    for row in rows:
        if row.get("context/max_train") or row.get("context/max_generate"):
            found[described(row)] = row
    return sorted(found.values(), key=longest, reverse=True)


def longest(row: dict) -> int:
    return row.get("context/max_train") or 0


def described(row: dict) -> tuple[str, ...]:
    """What a search for the longest context was made with."""
    config = row["config"]
    pos, checkpointing = config["model"].get("pos", ""), config["model"].get("checkpointing", "none")
    told = [millions(row), config["precision"], pos, *["a checkpoint a block"] * (checkpointing == "block")]
    return name(config), *told, f"{row['memory_gib']:.4g} GiB" if row.get("memory_gib") else ""


def context(rows: list[dict], colours: dict[str, str], subjects: dict[str, dict]) -> dict | None:
    """Dots over a logarithmic axis, beside nanoGPT's where the device is the one of these."""
    dots = {"train": [], "generate": []}
    memories = {described(row)[-1] for row in contexts(rows)}
    for number, row in enumerate(contexts(rows)):
        kernels, *settings = described(row)
        key, command = f"context{number}", row.get("command", "")
        subjects[key] = {"model": millions(row), "precisions": [row["config"]["precision"]], "command": command}
        for mode, mine in dots.items():
            if length := row.get(f"context/max_{mode}"):
                lines = [f"{length:,} tokens, {'a training step' if mode == 'train' else 'prefilled and 64 more'}"]
                lines += [kernels, " · ".join(filter(None, settings))]
                facts = {told: row.get(f"context/{mode}/{key}") for told, key in FACTS.items()}
                lines += known(facts)
                where = "<br>".join(map(escape, [kernels, *textwrap.wrap(" ".join(settings[: -1 if len(memories) == 1 else None]), 26)]))
                mine.append((where, length, colours[kernels], [key, said(lines, command)]))
    if not (dots["train"] or dots["generate"]):
        return None
    traces = []
    for mode, mine in dots.items():
        if mine:
            where, lengths, fills, custom = (list(each) for each in zip(*mine, strict=True))
            look = {"size": 13, "color": fills, "symbol": "circle" if mode == "train" else "circle-open", "line": {"width": 2.5, "color": fills}}
            trace = {"type": "scatter", "mode": "markers+text", "name": "training" if mode == "train" else "generation"}
            trace |= {"y": where, "x": lengths, "marker": look, "customdata": custom, "hovertemplate": SAID}
            trace |= {"text": [f"{length:,}" for length in lengths], "cliponaxis": False}
            traces.append(trace | {"textposition": f"{'top' if mode == 'train' else 'bottom'} center"})
    if any("H200" in row["env"]["device"] for row in rows) and any(millions(row) == "124M" for row in rows):
        custom = []
        for number, (who, length) in enumerate(NANOGPT.items()):
            key = f"nanogpt{number}"
            subjects[key] = {"model": "124M", "precisions": [], "command": ""}
            custom.append([key, said([f"{who}: {'about ' * (length == 1_900_000)}{length:,} tokens", "124M on one H200, batch 1, a training step"], "")])
        trace = {"type": "scatter", "mode": "markers+text", "name": "nanoGPT", "hovertemplate": SAID}
        trace |= {"y": [who.replace(", ", "<br>", 1) for who in NANOGPT], "x": list(NANOGPT.values()), "customdata": custom}
        trace |= {"text": [f"{length:,}" for length in NANOGPT.values()], "textposition": "top center"}
        traces.append(trace | {"marker": {"size": 11, "color": QUIET, "symbol": "x-thin", "line": {"width": 2.5, "color": QUIET}}})
    frame = axes("tokens", row=60)
    frame["layout"]["xaxis"] |= {"type": "log", "rangemode": "normal"} | octaves(traces, room=1.5)
    return {"data": traces, **frame}


def octaves(traces: list[dict], room: float = 0.2) -> dict:
    """Ticks at powers of two, 128K and 1M, and `room` octaves to either side."""
    lengths = [length for trace in traces for length in trace["x"]]
    low, high = min(lengths).bit_length() - 1, max(lengths).bit_length()
    powers = range(low, high + 1, 1 + (high - low) // 5)
    text = [f"{2**p >> 20}M" if p >= 20 else f"{2**p >> 10}K" if p >= 10 else str(2**p) for p in powers]
    ends = [math.log10(min(lengths) / 2**room), math.log10(max(lengths) * 2**room)]
    return {"tickvals": [2**p for p in powers], "ticktext": text, "tickmode": "array", "tickangle": 0, "range": ends}


def kernel_subject(subjects: dict[str, dict], kind: str, model: str, dtype: str, command: str) -> str:
    key = f"{kind}{len(subjects)}"
    subjects[key] = {"model": model, "precisions": PRECISIONS.get(dtype, []), "command": command}
    return key


def roofline(rows: list[dict], colours: dict[str, str], subjects: dict[str, dict]) -> dict | None:
    """The newest rows of kernels under the roof of their machine (Williams et al. 2009)."""
    newest = {(row["op"], row["dtype"], row["shape"], row["impl"]): row for row in rows if row.get("both/tflops")}
    if not newest:
        return None
    traces, at = [], {key: row["both/tflops"] / row["both/tb_per_s"] for key, row in newest.items()}
    bandwidth, peak = (max(row[f"ceiling/{key}"] for row in newest.values()) for key in ("tb_per_s", "tflops"))
    ends = min([*at.values(), peak / bandwidth]) / 3, max([*at.values(), peak / bandwidth]) * 3
    roof = sorted({*ends, peak / bandwidth})
    trace = {"type": "scatter", "mode": "lines", "line": {"color": INK, "width": 1.5}, "hoverinfo": "skip"}
    trace |= {"x": roof, "y": [min(peak, bandwidth * x) for x in roof]}
    traces.append(trace | {"name": f"{bandwidth:.3g} TB/s, {peak:.3g} TFLOP/s"})
    for impl in dict.fromkeys(key[3] for key in newest):
        trace = {"type": "scatter", "mode": "markers", "name": escape(impl), "hovertemplate": SAID}
        mine = {key: row for key, row in newest.items() if key[3] == impl}
        trace |= {"x": [at[key] for key in mine], "y": [row["both/tflops"] for row in mine.values()]}
        symbols = [SYMBOLS.get(row["op"], "circle") for row in mine.values()]
        trace["marker"] = {"color": colours[impl], "size": 11, "symbol": symbols, "line": {"color": "var(--card)", "width": 1}}
        custom = []
        for (op, dtype, shape, _), row in mine.items():
            command = f"python -m scripts.bench_kernels op={op} shape={shape} impl={impl} dtype={dtype}"
            model = re.match(r"\d+m(?=-|$)", shape)
            lines = [f"{op} {impl}: {row['both/ms']:.3f} ms ({row['both/ms/p20']:.3f} to {row['both/ms/p80']:.3f})"]
            lines += [f"{shape}, {dtype}, forward and backward", f"{row['both/tflops']:.1f} TFLOP/s, {row['both/tb_per_s']:.2f} TB/s"]
            lines += known({"{:.1%} of the floor": row.get("both/of_floor")})
            lines += [f"error {max(row['error/out'], row['error/gradients']):.1e}"]
            custom.append([kernel_subject(subjects, "kernel", model[0].upper() if model else "", dtype, command), said(lines, command)])
        traces.append(trace | {"customdata": custom})
    frame = axes("FLOP a byte, every tensor moved once", "TFLOP/s")
    for axis in ("xaxis", "yaxis"):
        frame["layout"][axis] |= {"type": "log", "dtick": 1}
    return {"data": traces, **frame}


def attention(rows: list[dict], colours: dict[str, str], subjects: dict[str, dict]) -> dict | None:
    """Time over T, both ways."""
    found = {key: row for key, row in newest_context(rows).items() if row.get("both/ms")} if rows else {}
    traces = []
    for impl in dict.fromkeys(impl for _, impl in found):
        mine = [row for (_, each), row in found.items() if each == impl]
        trace = {"type": "scatter", "mode": "lines+markers", "name": escape(impl), "hovertemplate": SAID}
        trace |= {"x": [row["T"] for row in mine], "y": [row["both/ms"] for row in mine]}
        trace |= {"line": {"color": colours[impl], "width": 2}, "marker": {"size": 8, "color": colours[impl]}}
        custom = []
        for row in mine:
            command = f"python -m scripts.bench_attention impl={impl} lengths=[{row['T']}] heads={row['heads']} "
            command += f"head_dim={row['head_dim']} dtype={row['dtype']}" + f" batch={row['batch']}" * bool(row["batch"])
            lines = [f"{impl}, T = {row['T']:,}: {row['both/ms']:.2f} ms"]
            lines += known({"{:.2f} GiB besides the inputs": row.get("both/peak_gib")})
            custom.append([kernel_subject(subjects, "attention", "", row["dtype"], command), said(lines, command)])
        traces.append(trace | {"customdata": custom})
    if not traces:
        return None
    frame = axes("T", "ms")
    frame["layout"]["yaxis"] |= {"type": "log", "dtick": 1}
    frame["layout"]["xaxis"] |= {"type": "log"} | octaves(traces)
    return {"data": traces, **frame}
