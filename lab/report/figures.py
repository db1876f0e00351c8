"""Draw PNGs from rows: the speed of choices, attention over T, kernels under the roofline, loss curves.

Each function returns the files that it wrote: none if the rows have no figure.
"""

from pathlib import Path

from lab.report.bench_panels import ATTENTION_UNITS, attention_figure, roofline_figure
from lab.report.choices import Choice
from lab.report.colours import CHOICE_COLOURS, choice_colours
from lab.report.loss_curves import Curve, with_reference
from lab.report.panels import LossCurve, loss_figure, peak_figure, speed_figure
from lab.report.png import LINES, draw_figures


def attention_plot(rows: list[dict], path: Path) -> list[Path]:
    """Draw time and memory of attention over T, forward + backward."""
    colours = choice_colours([], [row["impl"] for row in rows])
    return draw_figures([attention_figure(rows, colours, key) for key in ATTENTION_UNITS], path)


def roofline(rows: list[dict], path: Path) -> list[Path]:
    """Draw the newest row of each kernel under its machine's roofline."""
    return draw_figures([roofline_figure(rows, choice_colours([], [row["impl"] for row in rows]))], path)


def curves_plot(runs: list[Curve], path: Path) -> list[Path]:
    """Draw the losses of each run, and below them the differences from the first run of the same seed.

    There is at least one run. A choice has a colour, and a seed has a style of line.
    """
    choices, seeds = list(dict.fromkeys(run.choice for run in runs)), list(dict.fromkeys(run.seed for run in runs))
    curves = []
    for run, first in with_reference(runs):
        style = {"name": run.name, "colour": CHOICE_COLOURS[choices.index(run.choice) % len(CHOICE_COLOURS)]}
        style |= {"dash": [*LINES][seeds.index(run.seed) % len(LINES)], "width": 1}
        curves.append(LossCurve(run.losses, first.losses, style))
    y = "validation loss" if runs[0].losses is runs[0].validation else "training loss"
    return draw_figures([loss_figure(curves, y, "above the first of its seed")], path)


def speed_plot(choices: list[Choice], colours: dict[str, str], path: Path) -> list[Path]:
    """Draw tokens/s and peak memory of each choice, the first choice on top."""
    return draw_figures([speed_figure(choices, colours), peak_figure(choices, colours)], path)
