"""What a run says on the terminal, from the figures that it also writes."""

import statistics
from pathlib import Path
from typing import Any

import torch

from runtime.compare import differences, ratio
from runtime.device import Ceiling
from runtime.meter import WARMUP

FIGURES = ["tokens/s", "p20 to p80", "MFU", "peak GiB", "first step", "loss"]  # of a table of runs


def header(cfg: Any, row: dict, data: str, ceiling: Ceiling, folder: Path) -> str:
    """What is about to run: train.py's config, and the row so far."""
    m, t, n = cfg.model, cfg.train, row["world_size"]
    kernels = [f"{op} {who}" for op, who in row["kernels"].items() if op != "compile"]
    kernels += ["torch.compile"] * cfg.kernels.compile
    counted = (row["parameters"] - row["position_parameters"]) / 1e6
    peak = f"{ceiling.peak / 1e12:.1f} by data sheet" if ceiling.peak else "unknown to the table of GPUs"
    floor = 1e3 * ceiling.flops_per_token * t.tokens_per_step / n / ceiling.measured
    micro = t.tokens_per_step // (t.batch_size * t.block_size * n)
    heads = f"{m.n_head} heads" + (f" ({m.n_kv_head} of keys and values)" if m.n_kv_head else "")
    positions = f"{m.pos} positions" + (f", a window of {m.window:,}" if m.window else "")
    seen = min(t.block_size, m.window or t.block_size)
    many = f"{n} processes ({cfg.parallel}) with " if n > 1 else ""
    return f"""\
device   {row["env"]["device"]}, torch {torch.__version__}, precision {cfg.precision}
model    {row["parameters"] / 1e6:.1f}M: {m.n_layer} layers, {heads}, {m.n_embd} wide, {positions}
data     {data}
kernels  {" | ".join(kernels)}
step     {t.tokens_per_step:,} tokens: {many}{micro} micro-steps of {t.batch_size} sequences of {t.block_size:,}
mfu      (6 x {counted:.1f}M + 12 x {m.n_layer} x {m.n_embd} x {seen}) FLOP a token over the dense bf16 peak
peak     TFLOP/s: {peak}; {ceiling.measured / 1e12:.3g} by a matmul here, at which a step takes {floor:.1f} ms
folder   {folder}"""


def step_line(step: int, last: int | None, figures: dict, warming: bool) -> str:
    """One logged step, made for grep."""
    mfu, memory = figures["perf/mfu"], figures["mem/peak_allocated_gib"] or figures["mem/peak_rss_gib"]
    parts = [
        f"step {step:05d}/{last:05d}" if last else f"step {step:05d}",
        f"loss {figures['train/loss']:.4f}",
        f"norm {figures['train/grad_norm']:.2f}",
        f"lr {figures['train/lr']:.2e}",
        f"{figures['perf/step_ms']:.2f} ms",
        f"{figures['perf/tokens_per_sec']:,.0f} tok/s",
        "mfu --" if mfu is None else f"mfu {100 * mfu:.1f}%",
        f"mem {memory:.2f} GiB",
    ]
    return " | ".join(parts + ["warm-up"] * warming)


def val_line(step: int, last: int | None, loss: float) -> str:
    return f"step {step:05d}{f'/{last:05d}' if last else ''} | val loss {loss:.4f}"


def summary(row: dict) -> str:
    """The run's speed in two lines."""
    if row["perf/tokens_per_sec"] is None:
        return f"speed    not measured: the first {WARMUP} steps are warm-up, and the run ended there"
    spread = f"p20 {row['perf/tokens_per_sec/p20']:,.0f}, p80 {row['perf/tokens_per_sec/p80']:,.0f}"
    share = f"{100 * row['perf/mfu_measured_peak']:.1f}% of the measured matmul"
    if row["perf/mfu"] is not None:
        share = f"mfu {100 * row['perf/mfu']:.1f}%, {share}"
    return (
        f"speed    {row['perf/tokens_per_sec']:,.0f} tok/s median ({spread}), {row['perf/step_ms']:.2f} ms a step "
        f"({row['perf/data_wait_ms']:.2f} ms for data); {share}\n"
        f"start    {row['perf/first_step_s']:.1f} s for the first step, {row['perf/compile_s']:.1f} s of it to compile "
        f"and start; {row['perf/warmup_s']:.1f} s for the {WARMUP} of warm-up; {row['perf/recompiles']} recompilations"
    )


def proof_lines(row: dict) -> str:
    """What shows that a run is what its row says."""
    parity, memory = row["parity"], row["memory"]
    if parity["ok"] is None:
        told = f"not compared: {parity['why']}"
    else:
        told = (
            f"the first {parity['steps']} losses are {parity['loss_error']:.1e} from eager fp32's (bound "
            f"{parity['loss_bound']:.1e}), the first gradient {parity['gradient_error']:.1e} "
            f"({parity['gradient_bound']:.1e})"
        )
    busy = row["receipt"]["busy_ms"]
    families = [f"{name} {100 * ms / busy:.0f}%" for name, ms in row["receipt"]["families"].items() if ms > busy / 100]
    lines = [f"parity   {told}", f"receipt  {', '.join(families)} of {busy:.1f} ms in kernels"]
    for which, parts in memory.items():
        if parts:
            told = ", ".join(f"{name} {gib:.3g}" for name, gib in parts.items() if name != "peak")
            which += " without torch.compile" * (which == "predicted" and row["config"]["kernels"]["compile"])
            lines.append(f"memory   {which} {parts['peak']:.3g} GiB: {told}")
    return "\n".join(lines)


def speed(row: dict) -> float | None:
    """Tokens/s of a run that is complete and was long enough to measure."""
    return row.get("perf/tokens_per_sec") if row["status"] == "ok" else None


def figure_cells(row: dict) -> list[str]:
    """What a run is worth, under FIGURES; without a speed the first says why."""
    if row["status"] != "ok":
        return [row["status"], *[""] * (len(FIGURES) - 1)]
    told = ["too short", ""]
    if speed(row):
        told = [f"{speed(row):,.0f}", f"{row['perf/tokens_per_sec/p20']:,.0f} to {row['perf/tokens_per_sec/p80']:,.0f}"]
    memory, first = row["mem/peak_allocated_gib"] or row["mem/peak_rss_gib"], row["perf/first_step_s"]
    return [
        *told,
        f"{100 * row['perf/mfu']:.1f}%" if row["perf/mfu"] else "",
        f"{memory:.1f}",
        "" if first is None else f"{first:.1f} s",
        "" if row["train/loss"] is None else f"{row['train/loss']:.3f}",
    ]


def sweep_table(choices: dict[str, list[dict]]) -> str:
    """Choices by name with the rows of their runs, fastest first, each beside the first choice."""
    bases, *_ = choices.values()
    head = ["job", FIGURES[0], "of the first", *FIGURES[1:]]
    runs = {name: [row for row in rows if speed(row) is not None] for name, rows in choices.items()}
    fastest = sorted((name for name in runs if runs[name]), key=lambda name: -speed(typical(runs[name])))
    table = [head]
    for name in fastest:
        rest = figure_cells(typical(runs[name]))[1:]
        tokens_per_sec = f"{statistics.median(map(speed, runs[name])):,.0f}"
        table.append([name, tokens_per_sec, beside(choices[name], bases), *rest])
    table += [[name, figure_cells(rows[0])[0]] for name, rows in choices.items() if not runs[name]]
    widths = [max(len(cells[i]) for cells in table if i == 0 or len(cells) > 2) for i in range(len(head))]
    return "\n".join("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in table)


def typical(rows: list[dict]) -> dict:
    """Of several runs the one in the middle, by speed."""
    return sorted(rows, key=speed)[(len(rows) - 1) // 2]


def beside(rows: list[dict], bases: list[dict]) -> str:
    """The ratio of their speeds, where nothing else sets them apart."""
    measured = [[row for row in each if speed(row) is not None] for each in (rows, bases)]
    if rows is bases or not all(measured) or differences(*map(typical, measured)):
        return ""
    return str(ratio(rows, bases) or "")
