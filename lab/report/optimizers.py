"""What a step with Muon costs beside one with AdamW: the rows of `scripts/measure.sh muon_steps`."""

from statistics import median

from lab import rows as results
from lab.report.describe import sitting_text
from lab.report.presets import preset_of
from lab.report.tables import markdown_table, markdown_text
from lab.sweep.table import speed

HEAD = ["model", "precision", "AdamW: ms a step", "Muon: ms a step", "of AdamW's", "AdamW's update", "Muon's update"]


def muon_steps(device: str) -> str:
    """Return a line for each model and precision that was measured with both optimizers.

    The rows of a line are of one sitting: one GPU and one commit. Of several sittings, the newest counts.
    """
    sittings: dict[tuple, dict[str, list[dict]]] = {}
    for row in sorted(results.read_rows(f"{device}-optimizers"), key=lambda row: row["started"]):
        if speed(row):
            env, config = row["env"], row["config"]
            key = preset_of(row), config["precision"], env.get("git_commit"), env.get("gpu")
            sittings.setdefault(key, {}).setdefault(config["optim"]["name"], []).append(row)
    lines = {key[:2]: runs for key, runs in sittings.items() if runs.keys() == {"adamw", "muon"}}
    if not lines:
        return "Not measured yet: `scripts/measure.sh muon_steps`."
    table = markdown_table([*HEAD, "of Muon's step"], [[*key, *cells(**runs)] for key, runs in lines.items()])
    where = dict.fromkeys(markdown_text(sitting_text(runs["muon"][-1])) for runs in lines.values())
    return f"{table}\n\nOn {'; '.join(where)}."


def cells(adamw: list[dict], muon: list[dict]) -> list[str]:
    """Return the cells of HEAD from the third one on, and the update's share of Muon's step."""
    steps, updates = [], []
    for runs in (adamw, muon):
        steps.append(median(row["perf/step_ms"] for row in runs))
        timed = [(row.get("receipt") or {}).get("optimizer_ms") for row in runs]  # None without proof=true
        updates.append([ms for ms in timed if ms])
    ms = [f"{median(each):.2f} ms" if each else "" for each in updates]
    share = f"{median(updates[1]) / steps[1]:.1%}" if updates[1] else ""
    return [*(f"{step:.2f}" for step in steps), f"{steps[1] / steps[0]:.3f}", *ms, share]
