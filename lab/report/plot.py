"""A figure as data, and its JSON for Plotly, which page.js draws. png.py draws the same data with matplotlib."""

import html
import math
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from lab.report.colours import INK, text_on

LONGEST_LINE = 600  # characters of a hover text: a row's name may have any length


class Origin(NamedTuple):
    """What page.js knows of a point or of a whole line.

    The command is "" if the row has none that may run again. A filter ignores an origin whose setting is "".
    """

    hover: str  # lines of plain text
    command: str
    preset: str = ""
    precision: str = ""


@dataclass
class Point:
    """A point, or a horizontal bar, whose y is a category. Texts are plain."""

    x: float
    y: float | str
    origin: Origin | None = None
    colour: str = ""  # "": the colour of the series
    symbol: str = "circle"  # Plotly's name
    ring: float = 0
    text: str = ""
    spread: tuple[float, float] | None = None  # the ends of a bar's whiskers; in a PNG also the band of a line


@dataclass
class Series:
    """Points of one kind."""

    name: str  # in the legend, which omits ""
    mode: str  # "bars", or a mode of Plotly's scatter, such as "lines+markers"
    points: list[Point]
    colour: str = INK
    dash: str = "solid"
    width: float = 2
    size: float = 9
    ring_colour: str = ""  # "": the colour of the point
    side: str = ""  # of bars: bars of one side are stacked; of texts: their place
    opacity: float = 1
    origin: Origin | None = None  # of a whole line; then its points have none


@dataclass
class Figure:
    """Series over common axes. A figure of bars has the first category on top."""

    x: str
    y: str
    series: list[Series]
    below: list[Series] = field(default_factory=list)  # over the same x
    y_below: str = ""
    row: int = 0  # the pixels of a category; 0: y is a number
    categories: list[str] = field(default_factory=list)  # from top to bottom; []: in the order of the points
    log: dict[str, int | str] = field(default_factory=dict)  # "x" or "y" -> the distance of ticks as Plotly writes it
    octaves: float = 0  # a logarithmic x axis with ticks at powers of two, and this many octaves beside the points
    title: str = ""  # of the PNG

    def ordered_categories(self) -> list[str]:
        return [*dict.fromkeys(self.categories or [point.y for series in self.series for point in series.points])]


@dataclass
class Panel:
    """One card of the page."""

    id: str
    title: str
    text: str  # how to read the figure
    command: str  # measures what the figure shows
    figure: Figure | None  # None if no row has what the figure shows


def figure(x: str, y: str, series: list[Series], **settings) -> Figure | None:
    """Return the figure of the series that have points; None without one."""
    series = [each for each in series if each.points]
    return Figure(x, y, series, **settings) if series else None


def line(name: str, values: dict[float, float], **settings) -> Series:
    """Return a line through x -> y."""
    return Series(name, "lines", [Point(x, y) for x, y in values.items()], **settings)


def plotly(figure: Figure) -> dict:
    """Return the figure for page.js: `data` and `layout` of Plotly, and the height of a row."""
    xaxis, yaxis = {"title": {"text": figure.x}}, {"title": {"text": figure.y}}
    layout = {"xaxis": xaxis, "yaxis": yaxis, "barmode": "stack"}
    data = [trace(series) for series in figure.series]
    if figure.row:
        yaxis |= {"autorange": "reversed", "type": "category"}
        yaxis["categoryarray"] = list(map(markup, figure.ordered_categories()))
        xaxis |= {"rangemode": "tozero"}
    if figure.octaves:
        ticks, texts, ends = octave_ticks(figure)
        xaxis |= {"type": "log", "rangemode": "normal", "range": list(map(math.log10, ends))}
        xaxis |= {"tickmode": "array", "tickvals": ticks, "ticktext": texts, "tickangle": 0}
    for axis, distance in figure.log.items():
        layout[f"{axis}axis"] |= {"type": "log", "dtick": distance}
    if figure.below:
        data += [trace(series) | {"yaxis": "y2", "showlegend": False} for series in figure.below]
        layout["yaxis2"] = {"title": {"text": figure.y_below}, "domain": [0, 0.26], "zeroline": True, "nticks": 4}
        yaxis["domain"], xaxis["anchor"] = [0.34, 1], "y2"
    return {"data": data, "layout": layout, "row": figure.row}


@dataclass
class ValueLine:
    """A line of the table that has a figure's values. A filter ignores a setting that is ""."""

    cells: list[str]
    preset: str
    precision: str


def value_table(figure: Figure) -> tuple[list[str], list[ValueLine]]:
    """Return the columns and the lines of a figure's table, for readers who cannot see the figure.

    A figure of categories has a line for each category and a column for each series. Any other has a line for each
    point, but only for the first and the last of a curve. Series without an origin, such as a roofline, are left out.
    """
    series = [each for each in figure.series if each.origin or each.points[0].origin]
    if series and isinstance(series[0].points[0].y, str):
        return category_table(figure, series)
    lines = []
    for each, ending in [*((each, "") for each in series), *((each, f": {figure.y_below}") for each in figure.below)]:
        points = each.points if each.mode != "lines" else [each.points[0], each.points[-1]]
        for point in points:
            origin = each.origin or point.origin
            cells = [origin.hover.split("\n")[0] + ending, number(point.x), number(point.y)]
            lines.append(ValueLine(cells, origin.preset, origin.precision))
    return ["", figure.x, figure.y], lines


def category_table(figure: Figure, series: list[Series]) -> tuple[list[str], list[ValueLine]]:
    """Return value_table() of a figure of categories. Two points of one series in one category get two lines."""
    names = [each.name or figure.x for each in series]
    if len(set(names)) < len(names):
        names = [f"{name}, {each.side}" for name, each in zip(names, series, strict=True)]
    lines: dict[tuple, ValueLine] = {}
    count: Counter[tuple] = Counter()
    for column, each in enumerate(series, 1):
        for point in each.points:
            origin = each.origin or point.origin
            key = point.y, origin.preset, origin.precision
            count[column, key] += 1
            empty = ValueLine([" ".join(point.y.split()), *[""] * len(series)], origin.preset, origin.precision)
            lines.setdefault((key, count[column, key]), empty).cells[column] = number(point.x)
    order = figure.ordered_categories()
    return ["", *names], [lines[key] for key in sorted(lines, key=lambda key: order.index(key[0][0]))]


def number(value: float) -> str:
    """Return 640219.4 as "640,219" and 0.123456 as "0.1235"."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def trace(series: Series) -> dict:
    """Return the series as a trace of Plotly."""
    points, mode, colour = series.points, series.mode, series.colour
    fills = [point.colour or colour for point in points]
    label = markup if isinstance(points[0].y, str) else float
    rings = {"color": series.ring_colour or one(fills), "width": one([point.ring for point in points])}
    marker = {"color": one(fills), "opacity": series.opacity}
    values = {"name": markup(series.name), "marker": marker}
    values |= {"x": [point.x for point in points], "y": [label(point.y) for point in points]}
    if mode == "bars":
        values |= {"type": "bar", "orientation": "h", "offsetgroup": series.side}
    else:
        marker |= {"symbol": one([point.symbol for point in points]), "size": series.size, "line": rings}
        values |= {"type": "scatter", "mode": mode}
    if mode.startswith("lines"):
        values["line"] = {"color": colour, "width": series.width, "dash": series.dash}
    if mode == "lines":
        del values["marker"]
    if any(point.text for point in points):
        values["text"] = [markup(point.text) for point in points]
        if mode == "bars":  # inside the bar if it has the room
            values |= {"textposition": "auto", "insidetextanchor": "start", "textangle": 0, "constraintext": "none"}
            values["insidetextfont"] = {"color": one([text_on(fill) for fill in fills])}
        else:
            values |= {"textposition": series.side, "cliponaxis": False}
    if points[0].spread:
        sides = {"array": [point.spread[1] - point.x for point in points]}
        sides["arrayminus"] = [point.x - point.spread[0] for point in points]
        values["error_x"] = sides | {"type": "data", "symmetric": False, "color": INK, "thickness": 1, "width": 3}
    if series.origin:
        values["meta"] = series.origin
    elif points[0].origin:
        values["customdata"] = [point.origin for point in points]
    has_origin = series.origin or points[0].origin
    return values | {"hoverinfo": "none" if has_origin else "skip"}  # page.js draws the box itself


def one(values: list) -> object:
    """Return the value that all have in common; the list if they differ."""
    return values[0] if len(set(values)) == 1 else values


def octave_ticks(figure: Figure) -> tuple[list[float], list[str], tuple[float, float]]:
    """Return (at most 7 powers of two, their texts, the ends of the x axis).

    If no power of two lies between the ends, the ticks are the smallest and the largest value.
    """
    values = [point.x for series in figure.series for point in series.points]
    low, high = min(values) / 2**figure.octaves, max(values) * 2**figure.octaves
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    distance = 1 + len(powers) // 6
    ticks = [2**power for power in powers if power % distance == 0]  # 1 is a tick if the axis reaches it
    ticks = ticks or sorted({min(values), max(values)})
    return ticks, list(map(short_number, ticks)), (low, high)


def short_number(number: float) -> str:
    """Return 0.5 as "0.5", 64 as "64", 2^17 as "128K", 2^20 as "1M"."""
    if number >= 2**20:
        return f"{number / 2**20:.0f}M"
    return f"{number / 2**10:.0f}K" if number >= 2**10 else f"{number:g}"


def markup(text: str) -> str:
    """Return a plain text as HTML for Plotly, for which a formula would stand between two $."""
    return html.escape(text).replace("$", "&#36;").replace("\n", "<br>")


def wrap(text: str, width: int, **options) -> list[str]:
    """Return the lines of a text, 12 at most: a row's name or command may have any length."""
    return textwrap.wrap(text[: 13 * width], width, max_lines=12, placeholder=" ...", **options)


def make_origin(lines: list[str], command: str, preset: str = "", precision: str = "") -> Origin:
    """Return the origin whose hover text is the lines. page.js writes the first in bold, and adds the command."""
    return Origin("\n".join(line[:LONGEST_LINE] for line in lines), command, preset, precision)
