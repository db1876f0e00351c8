"""The lines that a run prints. Their figures come from the run's row and metrics."""

import sys
import threading
from pathlib import Path

import torch
from tqdm import tqdm

from common.terminal import printable
from runtime.meter import WARMUP
from runtime.power import tokens_per_joule_cell
from runtime.ranks import count_batch_ranks

# tqdm's own lock is shared with forks. A fork that is killed while it holds the lock would block every other bar
tqdm.set_lock(threading.RLock())


def header(row: dict, model: str, flops: str, data: str, folder: Path) -> str:
    """Return the lines that a training run prints at its start. `flops` is the formula of the model's FLOP a token."""
    config, processes = row["config"], row["world_size"]
    train, peak, measured_peak = config["train"], row["peak_flops"], row["measured_peak_flops"]
    kernels = [*kernel_texts(row).values(), *compile_texts(row, "torch.compile")]
    data_sheet = f"{peak / 1e12:.1f} by data sheet" if peak else "no data sheet is known"
    step_ms = 1e3 * row["flops_per_token"] * train["tokens_per_step"] / processes / measured_peak
    batch_ranks = count_batch_ranks(config["parallel"], processes)
    micro_steps = train["tokens_per_step"] // (train["batch_size"] * train["block_size"] * batch_ranks)
    step = f"{micro_steps} micro-steps of {train['batch_size']} sequences of {train['block_size']:,}"
    if batch_ranks < processes:
        step += f" in {processes} parts"
    if processes > 1:
        step = f"{processes} processes ({config['parallel']}) with {step}"
    return printable(f"""\
device   {row["env"]["device"]}, torch {torch.__version__}, precision {config["precision"]}
model    {model}
data     {data}
kernels  {" | ".join(kernels)}
step     {train["tokens_per_step"]:,} tokens: {step}
mfu      ({flops}) FLOP a token over the dense bf16 peak
peak     TFLOP/s: {data_sheet}; {measured_peak / 1e12:.3g} by a matmul here; at this speed a step takes {step_ms:.1f} ms
folder   {folder}""")


def model_header(row: dict, model: str, *lines: str, compiled: str = "torch.compile") -> str:
    """Return the lines that a script prints at its start: the device, the model, `lines`, and the kernels.

    `compiled` is what the line of the kernels says about torch.compile. A decoder other than blocks runs none of the
    other kernels in its steps, so the prefill's have a line of their own.
    """
    kernels = kernel_texts(row)
    device = f"device   {row['env']['device']}, torch {torch.__version__}, precision {row['config']['precision']}"
    text = [device, f"model    {model}", *lines]
    if not kernels.get("decode", "decode blocks").startswith(("decode blocks", "decode auto (blocks")):
        decoder = kernels.pop("decode")
        text.append(f"prefill  {' | '.join(kernels.values())}")
        kernels = {"decode": decoder}
    steps = [*kernels.values(), *compile_texts(row, compiled)]
    return printable("\n".join([*text, f"kernels  {' | '.join(steps)}"]))


def compile_texts(row: dict, text: str) -> list[str]:
    """Return what a header says about torch.compile: [`text` and a mode that is not the default], or an empty list."""
    if not row["kernels"]["compile"]:
        return []
    mode = row["config"].get("kernels", {}).get("compile_mode", "default")
    return [text if mode == "default" else f"{text}, {mode}"]


def kernel_texts(row: dict) -> dict[str, str]:
    """Return what computes each op: {"mlp": "mlp triton (...), slower than eager here: 7.29 ms beside 3.42"}."""
    texts = {op: f"{op} {description}" for op, description in row.get("kernels", {}).items() if op != "compile"}
    for op, known in row.get("slower", {}).items():
        baseline = "compiled eager" if known["baseline"] == "compile" else "eager"
        texts[op] += f", slower than {baseline} here: {known['ms']:.3g} ms beside {known['baseline_ms']:.3g}"
        texts[op] += f" at {known['at']}" if known["at"] else ""
    return texts


def progress_bar(total: int | None, initial: int, unit: str = "step") -> tqdm:
    """Return a progress bar. If stdout is not a terminal, the bar is hidden, and only lines from bar.write() appear."""
    return tqdm(total=total, initial=initial, unit=unit, disable=not sys.stdout.isatty(), leave=False, file=sys.stdout)


def step_line(step: int, last: int | None, figures: dict, warmup: bool) -> str:
    """Return the line of a logged step. Every line has the same form, for grep."""
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
    if warmup:
        parts.append("warm-up")
    return " | ".join(parts)


def val_line(step: int, last: int | None, loss: float) -> str:
    """Return the line of an evaluation."""
    return f"step {step:05d}{f'/{last:05d}' if last else ''} | val loss {loss:.4f}"


def sample_line(text: str) -> str:
    return printable(f"sample   {text}")


def power_line(row: dict) -> str:
    """Return a line break and the figures of runtime/power.py; empty if the row has none."""
    if "power/watts" not in row:
        return ""
    return (
        f"\npower    {row['power/watts']:.0f} of {row['power/limit_watts']:.0f} W, {100 * row['power/at_limit']:.0f}% "
        f"of the time at its limit; SM {row['power/sm_mhz']:,.0f} of {row['power/max_sm_mhz']:,} MHz; "
        f"{row['power/celsius']} C; {tokens_per_joule_cell(row)} tokens a joule"
    )


def summary(row: dict) -> str:
    """Return the speed of a training run in three lines, and a fourth one if the GPU's power is known."""
    if row["perf/tokens_per_sec"] is None:
        return f"speed    not measured: the first {WARMUP} steps are warm-up, and the run had no other steps"
    spread = f"p20 {row['perf/tokens_per_sec/p20']:,.0f}, p80 {row['perf/tokens_per_sec/p80']:,.0f}"
    share = f"{100 * row['perf/mfu_measured_peak']:.1f}% of the measured matmul"
    if row["perf/mfu"] is not None:
        share = f"mfu {100 * row['perf/mfu']:.1f}%, {share}"
    graph = row["cuda_graph"] if row["cuda_graph"] == "captured" else f"none: {row['cuda_graph']}"
    return (
        f"speed    {row['perf/tokens_per_sec']:,.0f} tok/s median ({spread}), {row['perf/step_ms']:.2f} ms a step "
        f"({row['perf/data_wait_ms']:.2f} ms for data); {share}\n"
        f"start    {row['perf/first_step_s']:.1f} s for the first step, {row['perf/compile_s']:.1f} s of it to compile "
        f"and start; {row['perf/warmup_s']:.1f} s for all {WARMUP} warm-up steps; "
        f"{row['perf/recompiles']} recompilations\n"
        f"graph    {graph}{power_line(row)}"
    )
