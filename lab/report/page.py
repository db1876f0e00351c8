"""Write the report of a folder: report.html, report.md, and PNGs.

report.html is one file that contains its figures and Plotly, and loads nothing from a network. It is made from
page.html.j2, page.css and page.js. Figures and Plotly are compressed in it, because Plotly alone has 4.8 MB.
"""

import base64
import contextlib
import gzip
import json
import os
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from common.files import read_text, write_atomically
from lab.report.bench_panels import benchmark_panels, draw_attention, draw_roofline
from lab.report.choice_table import notes, report_markdown, report_tables, wandb_table
from lab.report.choices import comparable_groups
from lab.report.colours import choice_colours
from lab.report.describe import choice_name
from lab.report.language_panel import language_panels
from lab.report.panels import choice_panels, draw_speeds
from lab.report.plot import LONGEST_LINE, plotly, value_table
from lab.report.recommendations import LADDER, recommendations
from lab.report.source import ReportSource, StoredRow, make_source, read_lines
from runtime import trackers
from runtime.config import UserError, check
from runtime.trackers import LoggerConfig

HERE = Path(__file__).parent
README = "results/README.md, the tables of all devices"
# a row with wrong or missing values may raise these
ROW_ERRORS = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)


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


def render(folder: Path, lines: list[StoredRow], left_out: list[str], force: bool = False) -> tuple[ReportSource, str]:
    """Return make_source() and its page. Raises one of ROW_ERRORS if report.md cannot be made, too."""
    source = make_source(folder, lines, left_out, force)
    report_markdown(source, [])
    return source, render_page(source)


def can_render(folder: Path, line: StoredRow) -> bool:
    """Return whether a page of this row alone can be made. A row may lack a key, or have a text as a speed."""
    try:
        with contextlib.suppress(UserError):  # it is of no kind that a report shows
            render(folder, [line, line], [])  # twice, because a single row is compared with none
    except ROW_ERRORS:
        return False
    return True


def draw_pictures(source: ReportSource) -> list[Path]:
    pictures = []
    if source.measured_choices:
        choices = source.measured_choices
        if source.from_results:  # rows of many sessions: the picture shows the largest group of comparable choices
            choices = max(comparable_groups(choices), key=len)
        colours = choice_colours(choice.name for choice in source.choices)
        pictures += draw_speeds(choices, colours, source.folder / "speed.png")
    pictures += draw_roofline(source.benchmarks["kernels"], source.folder / "roofline.png")
    return pictures + draw_attention(source.benchmarks["attention"], source.folder / "attention.png")


def render_page(source: ReportSource) -> str:
    """Return the HTML of the page."""
    from plotly.offline import get_plotlyjs

    names = [choice.name for choice in source.all_choices]
    names += [choice_name(row) for row in source.searches]
    backends = [row["impl"] for kind in ("kernels", "attention") for row in source.benchmarks[kind]]
    colours = choice_colours(names, backends)
    panels = [*choice_panels(source, colours), *benchmark_panels(source, colours), *language_panels(source)]
    figures = {panel.id: plotly(panel.figure) for panel in panels if panel.figure}
    tables = report_tables(source)
    lines = [line for table in tables for line in table.lines]  # each choice and each search has one
    presets, precisions = {line.preset for line in lines}, {line.precision for line in lines}
    jinja = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("page.html.j2").render(
        title=f"hotswap: what was measured {'on' if source.from_results else 'in'} {source.folder.resolve().name}",
        devices=devices_of(source),
        links=links() if source.from_results else {},
        filters={"Preset": sorted(presets - {""}), "Precision": sorted(precisions - {""})},
        recommendations=recommendations(source.measured),
        ladder_columns=LADDER,
        panels=panels,
        values={panel.id: value_table(panel.figure) for panel in panels if panel.figure},
        notes=notes(source),
        tables=tables,
        colours=colours,
        css=read_text(HERE / "page.css"),
        js=read_text(HERE / "page.js"),
        packed={
            "plotly": pack(get_plotlyjs()),
            "data": pack(json.dumps(figures, separators=(",", ":"), allow_nan=False)),
        },
    )


def devices_of(source: ReportSource) -> str:
    """Return the full names of the devices, such as "NVIDIA H200"."""
    names = dict.fromkeys(str(env["device"]) for env in source.environments if env.get("device"))
    return ", ".join(names)[:LONGEST_LINE]


def links() -> dict[str, str]:
    """Return name -> address of what a page of results/ links.

    A workflow of GitHub knows the repository's address. Elsewhere results/README.md is beside the page's folder, also
    in out/pages.
    """
    server, name = (os.environ.get(f"GITHUB_{key}") for key in ("SERVER_URL", "REPOSITORY"))
    if not (server and name):
        return {README: "../README.md"}
    address = f"{server}/{name}"
    return {README: f"{address}/blob/HEAD/results/README.md", "the repository": address}


def pack(text: str) -> str:
    """Return a text as gzip in base64, which page.js unpacks. Equal texts give equal bytes."""
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), mtime=0)).decode()


def publish(source: ReportSource, mode: str, files: list[Path]) -> list[Path]:
    """Send a table of the runs, and the files, to W&B, in the group of the sweep's runs.

    `mode` is offline or online. Returns [W&B's folder]; the list is empty if W&B does not start.
    """
    name = source.folder.resolve().name
    configs = [row.get("config", {}) for choice in source.all_choices for row in choice.rows]
    logger = next((config["logger"] for config in configs if "logger" in config), {})
    keys = {"project": "hotswap", "entity": None, "group": trackers.group_of(source.folder.resolve())}
    keys |= {"job_type": None, "tags": [], "notes": None, "artifacts": False}
    config = LoggerConfig("wandb", mode, **{key: logger.get(key) or default for key, default in keys.items()})
    folder = trackers.Tracker(config).publish_report(source.folder, name, wandb_table(source), files)
    return [Path(folder)] if folder else []
