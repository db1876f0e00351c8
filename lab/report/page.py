"""Write the report of a folder: report.html, report.md, and PNGs.

report.html is one file that contains its figures and Plotly, and loads nothing from a network. It is made from
page.html.j2, page.css and page.js.
"""

import contextlib
import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader

from common.files import read_text, write_atomically
from lab.report.bench_panels import benchmark_panels
from lab.report.choice_table import notes, report_markdown, report_tables, wandb_table
from lab.report.choices import Choice, comparable_groups, generation_sizes
from lab.report.colours import choice_colours
from lab.report.describe import choice_name, model_size
from lab.report.figures import attention_plot, roofline, speed_plot
from lab.report.panels import choice_panels
from lab.report.plot import number_points, page_entry, plotly
from lab.report.source import Line, ReportSource, make_source, read_lines
from lab.sweep.compare import ratio
from runtime import trackers
from runtime.config import UserError, check
from runtime.trackers import LoggerConfig

HERE = Path(__file__).parent
# of a row with wrong or missing values
ROW_ERRORS = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)
ENVIRONMENT = "device", "driver", "cuda", "cudnn", "torch", "triton", "python", "git_commit"


class Tile(NamedTuple):
    """A large number at the top of the page, such as 580,123 tokens/s, and a text that says what it measures."""

    value: str
    unit: str
    text: str


def write_report(folder: Path, force: bool = False) -> tuple[list[Path], ReportSource]:
    """Write report.html, report.md and the PNGs into the folder; return the files and what was read.

    Rows that the page cannot show are left out, and a note names them. Raises UserError if the folder has no rows, or
    if Plotly or matplotlib is missing.
    """
    for package in ("plotly", "matplotlib"):
        check(find_spec(package) is not None, f"the report needs {package}: pip install '.[report]'")
    lines, left_out = read_lines(folder)
    try:
        source, text = render(folder, lines, left_out, force)
    except UserError:
        raise
    except ROW_ERRORS:
        good = [line for line in lines if can_render(folder, line)]
        if good == lines:
            raise
        left_out += [str(line) for line in lines if line not in good]
        source, text = render(folder, good, left_out, force)
    page, markdown = folder / "report.html", folder / "report.md"
    write_atomically(page, text.encode(errors="replace"))
    pictures = draw_pictures(source)
    write_atomically(markdown, report_markdown(source, pictures).encode(errors="replace"))
    return [page, markdown, *pictures], source


def render(folder: Path, lines: list[Line], left_out: list[str], force: bool = False) -> tuple[ReportSource, str]:
    """Return make_source() and its page. Raises one of ROW_ERRORS if report.md cannot be made, too."""
    source = make_source(folder, lines, left_out, force)
    report_markdown(source, [])
    return source, render_page(source)


def can_render(folder: Path, line: Line) -> bool:
    """Return whether a page of this row alone can be made. A row may lack a key, or have a text as a speed."""
    try:
        with contextlib.suppress(UserError):  # it is of no kind that a report shows
            render(folder, [line], [])
    except ROW_ERRORS:
        return False
    return True


def draw_pictures(source: ReportSource) -> list[Path]:
    pictures, benchmarks = [], source.benchmarks
    if source.measured_choices:
        # results/ has rows of many sessions, which are not comparable
        choices = source.largest_group if source.from_results else source.measured_choices
        colours = choice_colours(choice.name for choice in source.choices)
        pictures.append(speed_plot(choices, colours, source.folder / "speed.png"))
    if benchmarks["kernels"]:
        pictures.append(roofline(benchmarks["kernels"], source.folder / "roofline.png"))
    if benchmarks["attention"]:
        pictures.append(attention_plot(benchmarks["attention"], source.folder / "attention.png"))
    return pictures


def render_page(source: ReportSource) -> str:
    """Return the HTML of the page."""
    from plotly.offline import get_plotlyjs

    names = [choice.name for choice in source.all_choices]
    names += [choice_name(row["config"]) for row in source.searches]
    backends = [row["impl"] for kind in ("kernels", "attention") for row in source.benchmarks[kind]]
    colours = choice_colours(names, backends)
    panels = [*choice_panels(source, colours), *benchmark_panels(source, colours)]
    entries = number_points(panels)
    for choice in source.all_choices:
        entries[choice.id] = page_entry(choice.model, [choice.precision] if choice.precision else [], choice.command)
    data = {"entries": entries, "panels": {panel.id: plotly(panel.figure) for panel in panels if panel.figure}}
    groups = headline_groups(source)
    jinja = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("page.html.j2").render(
        name=source.folder.resolve().name,
        subtitle=subtitle(source),
        models=options(entry["model"] for entry in entries.values()),
        precisions=options(precision for entry in entries.values() for precision in entry["precisions"]),
        selected=groups[0][0] if groups else None,
        headlines=[(fastest(group).id, headline_tiles(group, source)) for group in groups],
        panels=panels,
        notes=notes(source),
        tables=report_tables(source),
        colours=colours,
        environment=environment(source),
        css=read_text(HERE / "page.css"),
        js=read_text(HERE / "page.js"),
        plotly=get_plotlyjs(),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def options(values: Iterable[str]) -> list[str]:
    """Return the values of a filter, short ones first: 124M before 1558M."""
    return sorted({*values} - {""}, key=lambda value: (len(value), value))


def subtitle(source: ReportSource) -> str:
    machines = dict.fromkeys(env["device"] for env in source.environments if env.get("device"))
    runs = sum(len(choice.rows) for choice in source.all_choices)
    counts = [f"{len(source.all_choices)} choices, {runs} runs"] if runs else []
    return " · ".join([*machines, *counts])


def fastest(group: list[Choice]) -> Choice:
    return max(group, key=lambda choice: choice.speed)


def headline_groups(source: ReportSource) -> list[list[Choice]]:
    """Return one group of comparable choices for each model and precision: of training, or else of generation.

    It is the group with the fastest choice; a group of several choices has precedence over a single choice. The model
    and precision with the most choices come first. If two have equally many choices, the earlier job decides, and
    in results/ the faster choice.
    """
    by_settings: dict[tuple[str, str], list[list[Choice]]] = {}
    for group in comparable_groups(source.measured_choices or source.measured_generations):
        by_settings.setdefault((group[0].model, group[0].precision), []).append(group)

    def order(groups: list[list[Choice]]) -> tuple[int, float]:
        choices = [choice for group in groups for choice in group]
        first = -fastest(choices).speed if source.from_results else min(choice.number for choice in choices)
        return -len(choices), first

    ordered = sorted(by_settings.values(), key=order)
    return [max(groups, key=lambda group: (len(group) > 1, fastest(group).speed)) for groups in ordered]


def headline_tiles(group: list[Choice], source: ReportSource) -> list[Tile]:
    """Return the fastest choice's speed, ratio and memory, and the longest context of its model."""
    best = fastest(group)
    base, comparison = best.comparison.base, best.comparison
    settings = " in ".join(filter(None, (best.model, best.precision)))
    if best.generates:
        sizes = generation_sizes(best.row)
        settings += f", {sizes['batch']}, {sizes['prompt']}"
    tiles = [Tile(f"{best.speed:,.0f}", "tokens/s", f"{best.name}, {rank_text(best, group)}; {settings}")]
    if base is not best:
        interval = f" ({comparison.ratio.low:.3f} to {comparison.ratio.high:.3f})" if comparison.ratio else ""
        tie = comparison.ratio and comparison.ratio.verdict == "tie"
        tiles.append(Tile("a tie" if tie else f"{comparison.value:.2f}x", "", f"of {base.name}{interval}"))
    if best.memory:
        saved = (base.memory or best.memory) - best.memory
        text = f", {abs(saved):.1f} {'less' if saved > 0 else 'more'} than {base.name}" if abs(saved) >= 0.05 else ""
        digits = 2 if best.generates else 1
        kind = "peak memory" if best.row.get("mem/peak_allocated_gib") else "peak memory of the process (RSS)"
        tiles.append(Tile(f"{best.memory:.{digits}f}", "GiB", f"{kind}{text}"))
    searches = [row for row in source.searches if model_size(row) == best.model]
    if searches and searches[0].get("context/max_train"):
        config = searches[0]["config"]
        text = f"in the longest training step, with {choice_name(config)} in {config['precision']}"
        tiles.append(Tile(f"{searches[0]['context/max_train']:,}", "tokens", text))
    return tiles


def rank_text(best: Choice, group: list[Choice]) -> str:
    """Return "fastest of 5 choices", or the names of the choices with which it is in a tie."""
    if len(group) == 1:
        return "the only choice at these settings"
    others = sorted((choice for choice in group if choice is not best), key=lambda choice: -choice.speed)
    ratios = [(choice, ratio(best.rows, choice.rows)) for choice in others]
    ties = [choice.name for choice, ratio_to_best in ratios if ratio_to_best and ratio_to_best.verdict == "tie"]
    return f"in a tie with {', '.join(ties)}" if ties else f"fastest of {len(group)} choices"


def environment(source: ReportSource) -> dict[str, str]:
    """Return the versions and devices of all rows: "torch" -> "2.11.0, 2.12.0"."""
    texts = {}
    for key in ENVIRONMENT:
        length = 7 if key == "git_commit" else None
        values = dict.fromkeys(str(env[key])[:length] for env in source.environments if env.get(key))
        if values:
            texts[key.removeprefix("git_")] = ", ".join(values)
    return texts


def publish(source: ReportSource, mode: str, files: list[Path]) -> list[Path]:
    """Send a table of the runs, and the files, to W&B, in the group of the sweep's runs.

    `mode` is offline or online. Returns [W&B's folder]; the list is empty if W&B does not start.
    """
    name = source.folder.resolve().name
    configs = [row.get("config", {}) for choice in source.all_choices for row in choice.rows]
    logger = next((config["logger"] for config in configs if "logger" in config), {})
    group = trackers.group_of(source.folder.resolve())
    keys = {"project": "hotswap", "entity": None, "group": group, "job_type": None, "tags": [], "notes": None}
    keys = {key: logger.get(key) or default for key, default in keys.items()}
    config = LoggerConfig("wandb", mode, **keys)
    folder = trackers.Tracker(config).publish_report(source.folder, name, wandb_table(source), files)
    return [Path(folder)] if folder else []
