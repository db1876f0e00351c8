"""The table of the longest contexts, from rows of scripts.max_context."""

from lab import rows as results
from lab.report.describe import newest_searches, search_settings
from lab.report.presets import preset_of
from lab.report.tables import markdown_table

HEAD = ["model", "precision", "kernels", "attn", "pos", "checkpointing", "GiB"]
HEAD += ["longest T, training", "s a step", "peak GiB (predicted)", "longest T, generation"]


def max_context(device: str) -> str:
    rows = results.read_rows(device, "context")
    return max_context_table(rows) if rows else "No rows yet: `python -m scripts.max_context keep=true`."


def max_context_table(rows: list[dict]) -> str:
    """Return the newest search of each choice in each mode, the longest training T first."""
    return markdown_table(HEAD, map(search_cells, newest_searches(rows)))


def search_cells(row: dict) -> list[str]:
    """Return the cells of a search under HEAD."""
    train = {key.removeprefix("context/train/"): value for key, value in row.items()}
    trained, generated = length_cell(row, "train"), length_cell(row, "generate")
    computed = row.get("context/generate/computed")
    if computed and computed < row["context/max_generate"]:
        generated += f" (its last {computed:,} computed)"
    if "context/max_generate" not in row and row.get("status", "").startswith("stopped"):
        generated = "stopped"
    settings = [preset_of(row), *search_settings(row)[1:]]  # the size grows with a table of positions
    if not trained:
        return [*settings, train.get("limit") or "", "", "", generated]
    seconds = f"{train['seconds']:.3g}"
    if train.get("window") != row["config"]["model"].get("window"):
        seconds += f" with window {train['window']}"
    if full_attention := train.get("seconds_of_full_attention"):
        seconds = f"{full_attention:,.1f}, by shorter ones; {seconds}"
    peak = f"{train['peak_gib']:.2f}"
    if prediction := train.get("prediction"):
        peak += f" ({prediction['peak_gib']:.2f})"
    return [*settings, f"**{trained}**", seconds, peak, generated]


def length_cell(row: dict, mode: str) -> str:
    """Return the longest T of training or generation; "or more" if time ended the search before memory did."""
    length, limit = row.get(f"context/max_{mode}"), row.get(f"context/{mode}/limit")
    if not length:
        return ""
    return f"{length:,} or more" if limit == "timeout" else f"{length:,}"
