"""One page of everything in a folder: `python -m scripts.report out/SWEEP`

report.html holds its figures, Plotly and all, and asks nothing of any network; report.md holds the table, and PNGs
stand beside it. page.html, page.css and page.js are what the reader sees; choices.py reads and compares, panels.py and
benches.py turn that into figures, table.py into words.
"""

import json
from collections.abc import Iterable
from html import escape
from importlib.util import find_spec
from pathlib import Path
from string import Template

from runtime import trackers
from runtime.compare import ratio
from runtime.config import check
from runtime.trackers import LoggerConfig
from scripts.page.benches import benches, contexts, described
from scripts.page.choices import Choice, Source, alike, millions, name, read
from scripts.page.colours import colours
from scripts.page.panels import Panel, panels
from scripts.page.table import COLUMNS, cells, fallen, figures, markdown, notes, pictures

HERE = Path(__file__).parent
ENVIRONMENT = ("device", "driver", "cuda", "cudnn", "torch", "triton", "python", "git_commit")


def write(folder: Path, force: bool = False) -> tuple[list[Path], Source]:
    """Makes report.html, report.md and the PNGs in `folder`. UserError: it has no rows, or Plotly is missing."""
    for package in ("plotly", "matplotlib"):
        check(find_spec(package) is not None, f"the report needs {package}: pip install '.[report]'")
    source = read(folder, force)
    files = [folder / "report.html", folder / "report.md"]
    files[0].write_text(page(source), encoding="utf-8")
    drawn = pictures(source)
    files[1].write_text(markdown(source, drawn), encoding="utf-8")
    return files + drawn, source


def page(source: Source) -> str:
    """The HTML."""
    from plotly.offline import get_plotlyjs  # of the package its JavaScript alone

    names = [choice.name for choice in source.choices]
    names += [name(row["config"]) for row in contexts(source.benches["context"])]
    impls = [row["impl"] for kind in ("kernels", "attention") for row in source.benches[kind]]
    fills, subjects = colours(names, impls), {choice.id: subject(choice) for choice in source.choices}
    shown = [*panels(source, fills), *benches(source, fills, subjects)]
    groups = headlines(source)
    data = {"subjects": subjects, "panels": {panel.id: panel.figure for panel in shown if panel.figure}}
    precisions = [precision for each in subjects.values() for precision in each["precisions"]]
    parts = {
        "name": escape(source.folder.resolve().name),
        "subtitle": escape(subtitle(source)),
        "models": options([each["model"] for each in subjects.values()], groups and groups[0][0].model),
        "precisions": options(precisions, groups and groups[0][0].precision),
        "heroes": "\n".join(hero(group, source) for group in groups),
        "panels": "\n".join(section(panel) for panel in shown if panel.figure),
        "notes": "\n".join(f"<p>{escape(note)}</p>" for note in notes(source)),
        "table": table(source, fills),
        "failures": failures(source),
        "missing": missing([panel for panel in shown if not panel.figure]),
        "environment": environment(source),
        "css": (HERE / "page.css").read_text(),
        "js": (HERE / "page.js").read_text(),
        "plotly": get_plotlyjs(),
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/"),
    }
    return Template((HERE / "page.html").read_text()).substitute(parts)


def subject(choice: Choice) -> dict:
    """What page.js filters by, and copies."""
    precisions = [choice.precision] * bool(choice.precision)
    return {"model": choice.model, "precisions": precisions, "command": choice.command}


def options(values: Iterable[str], chosen: str | None) -> str:
    found = sorted({*values} - {""}, key=lambda value: (len(value), value))
    return "".join(f"<option{' selected' * (value == chosen)}>{escape(value)}</option>" for value in found)


def subtitle(source: Source) -> str:
    machines = dict.fromkeys(env["device"] for env in environments(source) if env.get("device"))
    runs = sum(len(choice.rows) for choice in source.choices)
    return " · ".join([*machines, *[f"{len(source.choices)} choices, {runs} runs"] * bool(runs)])


def headlines(source: Source) -> list[list[Choice]]:
    """Of each model and precision the comparable choices of which one is the fastest, and which are more than one.

    First those of most choices: of a sweep's then the first, of rows that were kept the fastest.
    """
    found: dict[tuple[str, str], list[list[Choice]]] = {}
    for group in alike(source.timed):
        found.setdefault((group[0].model, group[0].precision), []).append(group)

    def fastest(group: list[Choice]) -> float:
        return max(choice.speed for choice in group)

    def order(groups: list[list[Choice]]) -> tuple[int, float]:
        first = min(choice.number for group in groups for choice in group)
        return -sum(map(len, groups)), -max(map(fastest, groups)) if source.kept else first

    ordered = sorted(found.values(), key=order)
    return [max(groups, key=lambda group: (len(group) > 1, fastest(group))) for groups in ordered]


def hero(group: list[Choice], source: Source) -> str:
    best, *others = sorted(group, key=lambda each: -each.speed)
    base, where = best.against.base, " in ".join(filter(None, (best.model, best.precision)))
    ties = [each.name for each in others if (found := ratio(best.rows, each.rows)) and found.verdict == "tie"]
    among = f"fastest of {len(group)} choices" if others else "the only choice at these settings"
    among = f"in a tie with {', '.join(ties)}" if ties else among
    tiles = [(f"{best.speed:,.0f}", "tokens/s", f"{best.name}, {among}; {where}")]
    if base is not best:
        found = best.against.interval
        value = "a tie" if found and found.verdict == "tie" else f"{best.against.value:.2f}x"
        tiles.append((value, "", f"of {base.name}" + (f" ({found.low:.3f} to {found.high:.3f})" if found else "")))
    if best.memory:
        less = (base.memory or best.memory) - best.memory
        told = f", {abs(less):.1f} {'less' if less > 0 else 'more'} than {base.name}" if abs(less) >= 0.05 else ""
        tiles.append((f"{best.memory:.1f}", "GiB", f"at the peak{told}"))
    long = [row for row in contexts(source.benches["context"]) if millions(row) == best.model]
    if long and long[0].get("context/max_train"):
        who, precision = described(long[0])[0], long[0]["config"]["precision"]
        tiles.append(
            (f"{long[0]['context/max_train']:,}", "tokens", f"of one sequence train with {who} in {precision}")
        )
    shown = (
        f"<div><b>{value} <small>{unit}</small></b><span>{escape(told)}</span></div>" for value, unit, told in tiles
    )
    return f'<div class="hero" data-id="{best.id}">{"".join(shown)}</div>'


def section(panel: Panel) -> str:
    return (
        f'<section class="card" id="{panel.id}"><h2>{escape(panel.title)}</h2><p>{escape(panel.text)}</p>'
        f'<div class="legend"></div><div class="plot" role="img" aria-label="{escape(panel.title)}"></div></section>'
    )


def copy(command: str) -> str:
    """The button that copies it."""
    told = escape(command)
    return f'<button class="copy" data-command="{told}" title="{told}">copy command</button>' if command else ""


def table(source: Source, fills: dict[str, str]) -> str:
    """By choice, each with its command."""
    if not source.timed:
        return ""
    lines = ["".join(f"<th>{head}</th>" for head in [*COLUMNS, "again"])]
    for choice in source.timed:
        dot, (title, *rest) = f'<i class="dot" style="background:{fills[choice.name]}"></i>', map(escape, cells(choice))
        held = [f"{dot}{title}", *rest, copy(choice.command)]
        named = zip([*COLUMNS, "again"], held, strict=True)
        lines.append("".join(f'<td data-head="{head}">{cell}</td>' for head, cell in named))
    ids = ["", *(f' data-id="{choice.id}"' for choice in source.timed)]
    return "<table>" + "\n".join(f"<tr{key}>{line}</tr>" for key, line in zip(ids, lines, strict=True)) + "</table>"


def failures(source: Source) -> str:
    lines = [
        f'<tr data-id="{key}"><td>{escape(what)}</td><td>{escape(why)}</td><td>{copy(command)}</td></tr>'
        for key, what, why, command in fallen(source)
    ]
    head = '<section class="card" id="failures"><h2>Without a figure</h2><p>What did not run, or was wrong.</p>'
    return f"{head}<table>{''.join(lines)}</table></section>" if lines else ""


def missing(panels: list[Panel]) -> str:
    lines = []
    for panel in panels:
        told = f"{escape(panel.title)}: no row has it; <code>{escape(panel.command)}</code> brings one."
        lines.append(f"<li>{told} {copy(panel.command)}</li>")
    head = '<section class="card" id="missing"><h2>Not measured yet</h2>'
    return f"{head}<ul>{''.join(lines)}</ul></section>" if lines else ""


def environments(source: Source) -> list[dict]:
    rows = [row for choice in source.choices for row in choice.rows]
    rows += [row for found in source.benches.values() for row in found]
    return [row["env"] for row in rows if row.get("env")]


def environment(source: Source) -> str:
    """What the rows were measured with."""
    told = []
    for key in ENVIRONMENT:
        width = 7 if key == "git_commit" else None
        values = dict.fromkeys(str(env[key])[:width] for env in environments(source) if env.get(key))
        told += [f"<div><dt>{key.removeprefix('git_')}</dt><dd>{escape(', '.join(values))}</dd></div>"] * bool(values)
    return "".join(told)


def publish(source: Source, mode: str, files: list[Path]) -> list[Path]:
    """To W&B, in the group of the sweep's runs: a row a choice or failure with its figures, and the files."""
    name = source.folder.resolve().name
    logged = next(
        (row["config"]["logger"] for each in source.choices for row in each.rows if "logger" in row.get("config", {})),
        {},
    )
    config = LoggerConfig("wandb", mode, logged.get("project") or "hotswap", logged.get("group") or name)
    if where := trackers.publish(config, source.folder, name, figures(source), files):
        return [where]
    return []
