"""The first table of README.md: five results, and their ratios to torch.compile and nanoGPT.

nanoGPT's figures are in results/<device>/peers.jsonl, which has rows of other systems on this kind of device. The key
`ours` of a row has what this repo reached in the same session.
"""

from kernels.registry import backend, impls
from lab.report.choices import BASELINES, Choice, comparable_groups, group_runs
from lab.report.describe import (
    BASELINE,
    batch_cell,
    choice_key,
    choice_name,
    decoder,
    kernels_cell,
    model_size,
    newest_choices,
    sessions,
)
from lab.report.tables import markdown_table, peak_gib, ratio_to_baseline, shown_run
from lab.rows import read_rows
from lab.sweep.compare import sequences
from lab.sweep.table import speed


def headline(device: str) -> str:
    """Return the table, and a note on what its ratios compare."""
    runs, baseline = fastest_choice(device, "64 x 1024")
    row, base = shown_run(runs), shown_run(baseline)
    long_runs, long_baseline = fastest_choice(device, "4 x 16384")
    long_row = shown_run(long_runs)
    nanogpt = peer(device, "training", "nanoGPT")
    ours = nanogpt["ours"]
    lines = [
        [
            "training, 64 sequences of 1024",
            f"**{speed(row):,.0f}** tokens/s ({choice_cell(row)})",
            ratio_to_baseline(runs, baseline),
            format_ratio(ours["tokens_per_sec"], nanogpt["tokens_per_sec"]),
        ],
        [
            "its peak memory",
            f"**{peak_gib(row):.1f}** GiB",
            format_ratio(peak_gib(row), peak_gib(base)),
            format_ratio(ours["peak_gib"], nanogpt["peak_gib"]),
        ],
        [
            "training, 4 sequences of 16,384",
            f"**{speed(long_row):,.0f}** tokens/s ({choice_cell(long_row)})",
            ratio_to_baseline(long_runs, long_baseline),
            "",
        ],
        context_line(device),
        generation_line(device),
    ]
    head = ["GPT-2 124M, bf16, one H200", "hotswap", "of torch.compile", "of nanoGPT"]
    return f"{markdown_table(head, lines)}\n\n{comparison_note(device)}"


def comparison_note(device: str) -> str:
    """Return sentences: how nanoGPT was measured, and what the ratios of contexts compare."""
    nanogpt, lengths = peer(device, "training", "nanoGPT"), context_lengths(device)
    env = nanogpt["env"]
    without_checkpoints = max(length for (_, checkpointing), length in lengths.items() if checkpointing == "none")
    nanogpt_checkpoints = peer(device, "context", "nanoGPT", how="checkpoints")["max_train"]
    return (
        "The interval is 95%. nanoGPT trained with torch.compile and autocast, and generated without them, on an "
        f"{env['device'].removeprefix('NVIDIA ')} with torch {env['torch']} ([rows](results/{device}/peers.jsonl)). "
        "Its training is compared with a hotswap run of the same session, and its generation with the speed in the "
        "table. The longest context uses activation checkpoints in host memory; torch.compile and nanoGPT use none. "
        "Without checkpoints hotswap reaches "
        f"{without_checkpoints:,} tokens. With checkpoints and Liger's loss, nanoGPT would reach about "
        f"{nanogpt_checkpoints:,} by its bytes a token."
    )


def fastest_choice(device: str, batch: str) -> tuple[list[dict], list[dict]]:
    """Return (the runs of the fastest choice, the runs of compile + sdpa in the same session) for this batch."""
    rows = [row for row in read_rows(device) if not row["config"]["train"]["eval_every"] and is_124m(row)]
    rows = [row for row in newest_choices(rows) if batch_cell(row) == batch and row["config"]["precision"] == "bf16"]
    candidates = []
    for session in sessions(rows).values():
        choices: dict[tuple, list[dict]] = {}
        for row in session:
            choices.setdefault(choice_key(row), []).append(row)
        if BASELINE in choices:
            candidates += [(runs, choices[BASELINE]) for runs in choices.values() if speed(shown_run(runs))]
    return max(candidates, key=lambda pair: speed(shown_run(pair[0])))


def is_124m(row: dict) -> bool:
    """Return whether the row is of GPT-2 124M, with a position table of any length.

    The config of a generation from a checkpoint has no shape.
    """
    shape = row["config"].get("model")
    return (shape["n_layer"], shape["n_embd"]) == (12, 768) if shape else model_size(row) == "124M"


def choice_cell(row: dict) -> str:
    """Return "triton+compile, flash"; "decode int8" for a generation with another decoder than blocks."""
    return choice_name(row["config"]) if decoder(row["config"]) else ", ".join(choice_key(row))


def format_ratio(value: float, base: float) -> str:
    """Return "1.17x"; from 10 on "24x"; from 100 on two digits, "300x"."""
    ratio = value / base
    return f"{ratio:.2f}x" if ratio < 10 else f"{round(ratio, -1 if ratio >= 100 else 0):.0f}x"


def peer(device: str, measure: str, system: str, how: str = "") -> dict:
    """Return the first row of peers.jsonl for this measure and system, with `how` in its description."""
    rows = read_rows(device, "peers")
    return next(row for row in rows if (row["measure"], row["system"]) == (measure, system) and how in row["how"])


def context_lengths(device: str) -> dict[tuple[str, str], int]:
    """Return (kernels, checkpointing) -> the longest T of a training step in bf16, from the newest search."""
    lengths = {}
    for row in read_rows(device, "context"):
        if is_124m(row) and row["config"]["precision"] == "bf16" and row.get("context/max_train"):
            lengths[kernels_cell(row), row["config"]["model"]["checkpointing"]] = row["context/max_train"]
    return lengths


def context_line(device: str) -> list[str]:
    """Return the line of the longest T of a training step."""
    lengths = context_lengths(device)
    (_, checkpointing), longest = max(lengths.items(), key=lambda item: item[1])
    nanogpt = peer(device, "context", "nanoGPT", how="torch.compile")["max_train"]
    cell = f"**{longest:,}** tokens (checkpointing={checkpointing})"
    ratios = format_ratio(longest, lengths["compile", "none"]), format_ratio(longest, nanogpt)
    return ["the longest context of a step", cell, *ratios]


def generation_line(device: str) -> list[str]:
    """Return the line of the fastest choice for decoding one sequence of 124M in bf16.

    As in training it is the fastest one with torch.compile beside it; if none has, the fastest. A decoder whose proof
    says that it rounds is left out.
    """
    rows = [row for row in read_rows(device, "generate") if speed(row) and is_124m(row) and sequences(row) == 1]
    rows = [row for row in rows if row["config"]["precision"] == "bf16" and not rounds_on_purpose(row)]
    groups = comparable_groups(group_runs([(row, {}) for row in reversed(rows)]))
    beside = [group for group in groups if len(group) > 1 and baseline_rows(group)] or groups
    group = max(beside, key=lambda group: max(choice.speed for choice in group))
    best, baseline = max(group, key=lambda choice: choice.speed), baseline_rows(group)
    nanogpt = peer(device, "generation", "nanoGPT")["tokens_per_sec"]
    cell = f"**{best.speed:,.0f}** tokens/s ({choice_cell(best.row)})"
    return ["generation, one sequence", cell, ratio_to_baseline(best.rows, baseline), format_ratio(best.speed, nanogpt)]


def baseline_rows(group: list[Choice]) -> list[dict]:
    """Return the rows of torch.compile in a comparable group; [] if it has none."""
    return next((choice.rows for choice in group if choice.name.startswith(BASELINES[0])), [])


def rounds_on_purpose(row: dict) -> bool:
    """Return whether the decoder rounds the weights or the cache, so that its text is not the model's."""
    name = row["config"]["kernels"].get("decode", "blocks")  # older rows name none
    kv = row["config"].get("generate", {}).get("kv", "auto")
    return kv != "auto" or (name in impls("decode") and getattr(backend("decode", name), "LOSSY", False))
