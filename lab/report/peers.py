"""The table of other systems in results/README.md. It compares like with like.

results/<device>/peers.jsonl has rows of nanoGPT, llm.c and Hugging Face on this kind of device. A row about speed has
`ours`, what this repo reached in the same session. Contexts are compared with checkpoints on both sides, or on neither.
A generation without a KV cache is not compared, because ours has one.
"""

from collections.abc import Iterator

from kernels.registry import backend, impls
from lab.report.describe import decoder, kernels_cell, model_size
from lab.report.presets import preset_of_size
from lab.report.tables import markdown_table
from lab.rows import read_rows
from lab.sweep.compare import sequences
from lab.sweep.table import speed
from model.config import GPTConfig

NO_CACHE = "no cache"  # in `how` of a generation


def peers(device: str) -> str:
    """Return the table, and a sentence about the fastest decoder since."""
    rows = read_rows(device, "peers")
    head = ["what", "hotswap", "other system", "ratio"]
    lines = [*speed_lines(rows), *context_lines(device, rows)]
    return "\n\n".join([markdown_table(head, lines), *decoder_note(device, rows)])


def speed_lines(rows: list[dict]) -> Iterator[list[str]]:
    """Yield a line for each speed, and for each peak of the memory, with both sides from one session."""
    for row in rows:
        if "ours" not in row or NO_CACHE in row["how"]:
            continue
        ours, batch = row["ours"], f"{row['batch']} sequence" if row["batch"] == "1" else row["batch"]
        for key, unit in (("tokens_per_sec", "tokens/s"), ("peak_gib", "GiB")):
            if row.get(key) and ours.get(key):
                what = f"{row['measure']}, {preset_of_size(row['model'])}, {batch}"
                mine = f"{ours[key]:,} {unit} ({ours['choice']})"
                yield [what, mine, f"{row['system']}: {row[key]:,} ({row['how']})", ratio_text(ours[key], row[key])]


def context_lines(device: str, rows: list[dict]) -> Iterator[list[str]]:
    """Yield the longest contexts of a training step: without checkpoints, then with them."""
    lengths = context_lengths(device)
    others = [row for row in rows if row["measure"] == "context"]
    for checkpoints in (False, True):
        ours = {choice: length for choice, length in lengths.items() if (choice[1] != "none") == checkpoints}
        theirs = [row for row in others if ("checkpoints" in row["how"]) == checkpoints]
        if ours and theirs:
            (kernels, checkpointing), length = max(ours.items(), key=lambda item: item[1])
            best = max(theirs, key=lambda row: row["max_train"])
            which = "with" if checkpoints else "without"
            what = f"longest training step, {preset_of_size(best['model'])}, {which} checkpoints"
            choice = f"{kernels}, checkpointing={checkpointing}" if checkpoints else kernels
            other = f"{best['system']}: {best['max_train']:,} ({best['how']})"
            yield [what, f"{length:,} tokens ({choice})", other, ratio_text(length, best["max_train"])]


def context_lengths(device: str) -> dict[tuple[str, str], int]:
    """Return (kernels, checkpointing) -> the longest T of a training step of 124M in bf16, from the newest search."""
    lengths = {}
    for row in read_rows(device, "context"):
        if is_124m(row) and row["config"]["precision"] == "bf16" and row.get("context/max_train"):
            lengths[kernels_cell(row), row["config"]["model"]["checkpointing"]] = row["context/max_train"]
    return lengths


def decoder_note(device: str, rows: list[dict]) -> Iterator[str]:
    """Yield a sentence on our fastest exact decoder of one sequence, beside the fastest other system with a cache."""
    others = [row for row in rows if row["measure"] == "generation" and row["batch"] == "1"]
    others = [row for row in others if NO_CACHE not in row["how"]]
    ours = [row for row in read_rows(device, "generate") if is_exact_sequence(row)]
    if ours and others:
        best, other = max(ours, key=speed), max(others, key=lambda row: row["tokens_per_sec"])
        rate, ratio = f"{speed(best):,.0f} tokens/s", ratio_text(speed(best), other["tokens_per_sec"])
        yield (
            f"In another session, `kernels.decode={decoder(best['config']) or 'blocks'}` made {rate} for one sequence: "
            f"{ratio} the speed of {other['system']} in the table."
        )


def is_exact_sequence(row: dict) -> bool:
    """Return whether the row has a speed of one sequence of 124M in bf16, without a draft and without rounding."""
    drafts = (row["config"].get("generate") or {}).get("speculate")
    is_one = bool(speed(row)) and is_124m(row) and sequences(row) == 1
    return is_one and row["config"]["precision"] == "bf16" and not drafts and not rounds_on_purpose(row)


def is_124m(row: dict) -> bool:
    """Return whether the row is of GPT-2 124M, with or without checkpoints, and with a position table of any length.

    The config of a generation from a checkpoint has no shape.
    """
    shape = row["config"].get("model")
    if not shape:
        return model_size(row) == "124M"
    is_gpt2 = GPTConfig.changes(shape).keys() <= {"checkpointing", "keep_attention"}
    return is_gpt2 and (shape["n_layer"], shape["n_embd"]) == (12, 768)


def rounds_on_purpose(row: dict) -> bool:
    """Return whether the decoder rounds the weights or the cache, so that its text is not the model's."""
    name = row["config"]["kernels"].get("decode", "blocks")  # older rows name none
    kv = row["config"].get("generate", {}).get("kv", "auto")
    return kv != "auto" or (name in impls("decode") and getattr(backend("decode", name), "LOSSY", False))


def ratio_text(value: float, base: float) -> str:
    """Return "1.17x"; from 10 on "16x"."""
    ratio = value / base
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"
