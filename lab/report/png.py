"""Draw a figure as a PNG with matplotlib."""

import io
from math import ceil
from pathlib import Path

from common.files import write_atomically
from common.terminal import printable
from lab.report.colours import GRID, QUIET
from lab.report.plot import Figure, Series, octave_ticks

# Plotly's names -> matplotlib's
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "cross": "P", "triangle-up": "^", "star": "*"}
MARKERS |= {"x": "X", "pentagon": "p", "triangle-down": "v", "hexagon": "h", "diamond-tall": "d", "triangle-left": "<"}
MARKERS |= {"triangle-right": ">", "hexagram": (6, 1, 0), "circle-open": "o"}  # a star with six rays
LINES = {"solid": "-", "dot": ":", "longdash": "--", "dash": "-."}


def plain(text: str, width: int = 80) -> str:
    """Return a text of a row for matplotlib, which would read a formula between two $, and hide a label `_name`."""
    text = " ".join(printable(text).split()) or "?"
    text = text if len(text) <= width else f"{text[: width - 3]}..."
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def subplots(*args, **settings) -> tuple:
    """Return a figure and its axes, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*args, **settings)


def save(figure, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    write_atomically(path, content.getvalue())
    return path


def draw_figures(figures: list[Figure | None], path: Path, columns: int | None = None) -> list[Path]:
    """Draw figures side by side, or in rows of `columns`. Return [path], or [] if no figure has points.

    Bars share their categories, and bars of one unit also their scale.
    """
    figures = [figure for figure in figures if figure]
    if not figures:
        return []
    first = figures[0]
    categories = dict.fromkeys(point.y for point in first.series[0].points) if first.row else ()
    columns = min(columns or len(figures), len(figures))
    rows = ceil(len(figures) / columns)
    sizes = {"figsize": (13, 1 + 0.55 * len(categories)) if first.row else (6.5 * columns + 1.5, 5.5 * rows)}
    if first.row:
        of_one_unit = len({figure.x for figure in figures}) == 1
        first_width = 1 if of_one_unit else 1.5
        sizes |= {"sharex": of_one_unit, "sharey": "row", "width_ratios": [first_width] + [1] * (len(figures) - 1)}
    if first.below:
        sizes |= {"sharex": "col", "height_ratios": [3, 2]}
    drawing, axes = subplots(2 if first.below else rows, columns, squeeze=False, **sizes)
    for index, figure in enumerate(figures):
        row, column = divmod(index, columns)
        top, bottom = axes[row][column], axes[-1 if figure.below else row][column]
        for series in figure.series:
            draw_series(top, series)
        for series in figure.below:
            draw_series(bottom, series)
        for panel in {top, bottom}:
            panel.grid(color=GRID, axis="x" if figure.row else "both")
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
        top.set(ylabel=figure.y, **{f"{axis}scale": "log" for axis in figure.log})
        bottom.set_xlabel(figure.x)
        if figure.octaves:
            ticks, texts, ends = octave_ticks(figure)
            top.set(xscale="log", xlim=ends)
            top.set_xticks(ticks, texts)
            top.minorticks_off()
        if figure.below:
            bottom.set_ylabel(figure.y_below)
            bottom.axhline(0, color=QUIET, linewidth=1)
        if figure.row:
            top.locator_params("x", nbins=3)  # with more, 250,000 and 500,000 overlap in a narrow panel
            top.xaxis.set_major_formatter("{x:,.10g}")  # a tiny model needs 0.5 GiB
            top.set_ylim(len(categories) - 0.4, -0.6)  # downwards
            top.margins(x=0.2)
        top.set_title(plain(figure.title, 160) if figure.title else "", loc="left", fontsize=9)
    if len([each for each in first.series if each.name]) > 1:
        axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return [save(drawing, path)]


def draw_series(panel, series: Series) -> None:
    points, colour = series.points, series.colour
    label = plain(series.name) if series.name else None
    if series.mode == "bars":
        categories = ["\n".join(map(plain, point.y.split("\n")[:3])) for point in points]
        panel.barh(categories, [point.x for point in points], color=[point.colour or colour for point in points])
        for category, point in zip(categories, points, strict=True):
            low, high = point.spread or (point.x, point.x)
            if high > low:
                style = {"color": "black", "linewidth": 1, "capsize": 2}
                panel.errorbar(point.x, category, xerr=[[point.x - low], [high - point.x]], **style)
            if point.text:
                style = {"textcoords": "offset points", "va": "center"}
                panel.annotate(plain(point.text), (high, category), (4, 0), **style)
    if series.mode.startswith("lines"):
        style = {"color": colour, "linewidth": series.width, "linestyle": LINES[series.dash], "label": label}
        xs = [point.x for point in points]
        panel.plot(xs, [point.y for point in points], **style)
        if points[0].spread:
            panel.fill_between(xs, *zip(*(point.spread for point in points), strict=True), color=colour, alpha=0.2)
    if "markers" in series.mode:
        style = {"color": colour, "linestyle": "", "markersize": series.size / 2}
        for point in points:
            hollow = {"markerfacecolor": "none"} if point.symbol.endswith("-open") else {}
            panel.plot(point.x, point.y, marker=MARKERS[point.symbol], **style, **hollow)
        if series.mode == "markers":
            panel.plot([], [], marker="o", label=label, **style)  # for the legend
