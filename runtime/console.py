"""What a run says on the terminal, from the figures that it also writes."""

from runtime.meter import WARMUP


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
