"""The table by choice: for the page, for report.md beside its PNGs, and for W&B."""

from pathlib import Path

from runtime.console import speed
from scripts.figures import context_plot, roofline
from scripts.page.benches import contexts
from scripts.page.choices import Choice, Source, again, alike
from scripts.page.colours import colours
from scripts.report import longest_table

COLUMNS = ["choice", "tokens/s", "of the baseline", "GiB", "first step", "parity", "most time in"]


def cells(choice: Choice) -> list[str]:
    """Of a choice with a speed, under COLUMNS."""
    (low, high), row, count = choice.interval, choice.row, len(choice.speeds)
    found, receipt, first = row.get("parity") or {}, row.get("receipt") or {}, row.get("perf/first_step_s")
    took = sorted((receipt.get("families") or {}).items(), key=lambda each: -each[1])[:3]
    return [
        choice.title,
        f"{choice.speed:,.0f} ({low:,.0f} to {high:,.0f})" + f", {count} runs" * (count > 1),
        choice.versus,
        f"{choice.memory:.1f}" if choice.memory else "",
        "" if first is None else f"{first:.1f} s" + f", {row.get('perf/cache')} caches" * bool(row.get("perf/cache")),
        "" if found.get("ok") is None else f"{'holds' if found['ok'] else 'fails'}, loss {found['loss_error']:.1e}",
        ", ".join(f"{family} {ms:.1f} ms" for family, ms in took),
    ]


def fallen(source: Source) -> list[tuple[str, str, str, str]]:
    """(id, what, why, command) of each row without a result."""
    told = [(choice.id, choice.title, row["status"], choice.command) for choice, row in source.failed]
    told = [(key, what, "too short" if why == "ok" else why, command) for key, what, why, command in told]
    for row in source.benches["attention"]:
        if row.get("status", "ok") != "ok":
            told.append(("", f"attention {row['impl']}, T = {row['T']:,}", row["status"], ""))
    for row in source.benches["context"]:
        if not (row.get("context/max_train") or row.get("context/max_generate")):
            why = row["status"] if row["status"] != "ok" else f"not even 128 tokens: {row.get('context/train/limit')}"
            told.append(("", f"longest context, {row['name']}", why, again(row)))
    return told


def notes(source: Source) -> list[str]:
    """What the comparisons are."""
    told = []
    if any(choice.against.base is not choice for choice in source.timed):
        first = "" if source.kept else "that of the first job, else "
        told.append(
            f"A choice stands beside the baseline of its settings: {first}compile · sdpa, else eager, else the "
            "first that ran; a tie is where 1 lies in the 95% interval."
        )
    if source.unread:
        told.append(f"Left out, as it cannot be read: {', '.join(map(str, source.unread))}.")
    if any(choice.against.base is not choice and not choice.against.interval for choice in source.timed):
        told.append("Runs of one lap, or older than laps, have no interval: their ratios are of the medians alone.")
    if any(choice.against.differs for choice in source.timed):
        told.append("With --force all stand beside the first choice, whatever else differs; that is named beside them.")
    elif any(choice.uncompared for choice in source.timed):
        told.append("Choices at other settings are not compared; --force does it, and names what differs.")
    return told


def figures(source: Source) -> list[list]:
    """The same as numbers, a line a run, and the names of its columns: for W&B."""
    keys = ["perf/tokens_per_sec", "perf/tokens_per_sec/p20", "perf/tokens_per_sec/p80", "perf/step_ms", "perf/mfu"]
    keys += ["perf/first_step_s", "perf/recompiles", "mem/peak_allocated_gib", "train/loss"]
    head = ["choice", "model", "precision", "status", *keys]
    head += ["ratio", "ratio_low", "ratio_high", "baseline", "parity", "command"]
    lines = []
    for choice in source.choices:
        against, parity = choice.against, choice.row.get("parity") or {}
        span = against.interval if against else None
        versus = [against and against.value, span and span.low, span and span.high, against and against.base.title]
        for row in choice.rows:
            shown = [row.get(key) if speed(row) else None for key in keys]
            lines.append(
                [
                    choice.title,
                    choice.model,
                    choice.precision,
                    row["status"],
                    *shown,
                    *versus,
                    parity.get("ok"),
                    choice.command,
                ]
            )
    return [head, *lines]


def markdown(source: Source, pictures: list[Path]) -> str:
    """report.md"""
    table = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, source.timed)]
    parts = [f"# {source.folder.resolve().name}", *notes(source)]
    parts += ["\n".join(f"| {' | '.join(bare(cell) for cell in line)} |" for line in table)] * bool(source.timed)
    if found := contexts(source.benches["context"]):
        parts.append(longest_table(found))
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    parts += ["\n".join(f"- {bare(what)}: {bare(why)}" for _, what, why, _ in fallen(source))] * bool(fallen(source))
    return "\n\n".join([*parts, "The same with everything else, in [report.html](report.html)."]) + "\n"


def bare(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def pictures(source: Source) -> list[Path]:
    """The PNGs: speeds, and what scripts/report.py draws of kernels and attention."""
    kinds = {"kernels": (roofline, "roofline.png"), "attention": (context_plot, "attention.png")}
    drawn = [speeds(source, source.folder / "speed.png")] if source.timed else []
    for kind, (draw, file) in kinds.items():
        if rows := source.benches[kind]:
            drawn.append(draw(rows, source.folder / file))
    return drawn


def speeds(source: Source, path: Path) -> Path:
    """Draws tokens/s by choice, and the peak memory beside it; of kept rows, the most that can be compared."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = max(alike(source.timed), key=len)[::-1] if source.kept else source.timed[::-1]
    fills = colours(choice.name for choice in source.choices)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 1 + 0.4 * len(timed)), sharey=True, width_ratios=[3, 1])
    titles, shades = [choice.title for choice in timed], [fills[choice.name] for choice in timed]
    speeds, memory = [choice.speed for choice in timed], [choice.memory or 0 for choice in timed]
    ends = [[choice.speed - choice.interval[0], choice.interval[1] - choice.speed] for choice in timed]
    left.barh(titles, speeds, xerr=list(zip(*ends, strict=True)), color=shades, error_kw={"linewidth": 1, "capsize": 2})
    right.barh(titles, memory, color=shades)
    left.set_xlabel("tokens/s")
    left.xaxis.set_major_formatter("{x:,.0f}")
    right.set_xlabel("GiB at the peak")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_ylim(-0.6, len(timed) - 0.4)  # by default 5% of the bars above and below are empty
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path
