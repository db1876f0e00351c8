"""The runs of a folder in results/ with a loss curve: do they train alike, and how fast do they reach a loss?

Times are those of the steps alone: a run's median step, times the number of steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from statistics import mean, stdev

from lab import rows as results
from lab.report.colours import CHOICE_COLOURS
from lab.report.describe import kernels_cell
from lab.report.panels import LossCurve, loss_figure
from lab.report.plot import Figure, Point, Series, figure
from lab.report.png import LINES, draw_figures
from lab.report.tables import markdown_table
from lab.sweep.table import speed, speed_cell

MIN_EVALUATIONS = 10  # with fewer, a figure shows the training losses
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}


@dataclass(frozen=True)
class Curve:
    """A run with its losses: step -> loss."""

    row: dict
    name: str
    training: dict[int, float]
    validation: dict[int, float]

    @property
    def seed(self) -> int:
        return self.row["config"]["seed"]

    @property
    def choice(self) -> tuple[str, str]:
        return self.row["config"]["precision"], kernels_cell(self.row)

    @property
    def optimizer(self) -> str:
        return OPTIMIZERS[self.row["config"].get("optim", {}).get("name", "adamw")]

    @property
    def minutes_per_step(self) -> float | None:
        """The median; None if the run has no speed."""
        return self.row["perf/step_ms"] / 60_000 if self.row.get("perf/step_ms") else None

    @property
    def last(self) -> float:
        return self.validation[max(self.validation)]

    @property
    def losses(self) -> dict[int, float]:
        """The losses of a figure."""
        return self.validation if len(self.validation) >= MIN_EVALUATIONS else self.training

    def steps_to(self, loss: float) -> float | None:
        """Return the number of steps until the validation loss is `loss`; None if the run does not reach it.

        Between two evaluations the loss counts as a straight line. If the first evaluation is below `loss` already, its
        step counts.
        """
        points = sorted(self.validation.items())
        reached = [step for step, value in points[:1] if value <= loss]
        for (start, high), (end, low) in pairwise(points):
            if low <= loss < high:
                reached.append(end - (end - start) * (loss - low) / (high - low))
        return reached[0] if reached else None

    def minutes_to(self, loss: float) -> float | None:
        """Return the time of the steps of steps_to(); None if the run does not reach `loss`, or has no speed."""
        steps = self.steps_to(loss)
        return None if steps is None or self.minutes_per_step is None else steps * self.minutes_per_step


def curves(device: str) -> list[Curve]:
    """Return the runs that have losses in curves/, oldest first. Of runs with the same name, the last is returned."""
    found = {}
    for row in results.read_rows(device):
        path = results.curve_file(results.RESULTS / device, row)
        lines = results.read_whole(path)
        losses = [{line["step"]: line[key] for line in lines if key in line} for key in ("train/loss", "val/loss")]
        if any(losses):
            found[path.stem] = Curve(row, path.stem, *losses)
    return [*found.values()]


def with_reference(runs: list[Curve]) -> list[tuple[Curve, Curve]]:
    """Return each run with the first run of its seed, which may be itself."""
    return [(run, next(first for first in runs if first.seed == run.seed)) for run in runs]


def agreement(device: str) -> str:
    """Return a sentence for each later loss curve: how much its training losses differ from the first curve's.

    A curve without a step of the first curve has no sentence.
    """
    runs, sentences = curves(device), []
    for run in runs[1:]:
        first = runs[0]
        steps = sorted(first.training.keys() & run.training.keys())
        if not steps:
            continue
        gaps = [abs(first.training[step] - run.training[step]) for step in steps]
        sentences.append(
            f"Over {len(gaps)} steps, the losses of `{first.name}` and `{run.name}` differ by {mean(gaps):.4f} in "
            f"the mean and by {max(gaps):.4f} at most. The last losses are {first.training[steps[-1]]:.4f} and "
            f"{run.training[steps[-1]]:.4f}."
        )
    return "\n".join(sentences)


def spread(figures: Sequence[float], form: str) -> str:
    """Return "**0.9697** (sd 0.0019)": the mean, and the standard deviation if there are several figures."""
    return f"**{mean(figures):{form}}**" + (f" (sd {stdev(figures):.4f})" if len(figures) > 1 else "")


def times(factors: Sequence[float | None]) -> str:
    """Return the mean of the factors that are known, such as "1.67x"; empty if none is."""
    known = [factor for factor in factors if factor is not None]
    return f"{mean(known):.2f}x" if known else ""


def long_runs(device: str) -> str:
    """Return the table of the last validation losses: each run beside the first run of its seed, then the means.

    `to the same loss` is the first run's time to the higher of their two last losses, divided by this run's time. Runs
    without a validation loss are left out.
    """
    head = ["precision", "kernels", "seed", "last validation loss", "above the first", "tokens/s"]
    choices: dict[tuple[str, str], list[tuple]] = {}
    lines = []
    for run, first in with_reference([run for run in curves(device) if run.validation]):
        gap, loss = run.last - first.last, max(run.last, first.last)
        minutes, first_minutes = run.minutes_to(loss), first.minutes_to(loss)
        faster = first_minutes / minutes if minutes and first_minutes else None
        choices.setdefault(run.choice, []).append((run.last, gap, faster))
        compared = ["", ""] if run is first else [f"{gap:+.4f}", times([faster])]
        lines.append([*run.choice, str(run.seed), f"{run.last:.4f}", compared[0], speed_cell(run.row), compared[1]])
    for choice, figures in choices.items():
        losses, gaps, speeds = zip(*figures, strict=True)
        compared = [spread(gaps, "+.4f"), times(speeds)] if any(gaps) else ["", ""]
        lines.append([*choice, "mean", spread(losses, ".4f"), compared[0], "", compared[1]])
    return markdown_table([*head, "to the same loss"], lines)


def optimizers(device: str) -> str:
    """Return the figure and the table of a folder with AdamW's and Muon's runs; "" without runs of both.

    The table has means over the seeds. The loss to reach is the last one of AdamW in bf16 with the same seed.
    """
    choices = by_optimizer([run for run in curves(device) if run.validation])
    baselines = {run.seed: run for run in choices.get(("bf16", "AdamW"), [])}
    if len({optimizer for _, optimizer in choices}) < 2 or not baselines:
        return ""
    head = ["precision", "optimizer", "seeds", "last validation loss", "tokens/s", "million tokens to AdamW's loss"]
    lines = []
    for choice, runs in choices.items():
        speeds = [speed(run.row) for run in runs if speed(run.row)]
        losses = spread([run.last for run in runs], ".4f")
        cells = [str(len(runs)), losses, f"{mean(speeds):,.0f}" if speeds else ""]
        lines.append([*choice, *cells, *reach_cells(runs, baselines)])
    table = markdown_table([*head, "of AdamW's", "minutes to it", "of AdamW's minutes"], lines)
    return f"![losses over tokens and over minutes]({device}/curves.png)\n\n{table}"


def by_optimizer(runs: list[Curve]) -> dict[tuple[str, str], list[Curve]]:
    """Return (precision, optimizer) -> the last complete run of each seed: bf16 first, and AdamW before Muon."""
    complete = [run for run in runs if run.row["status"] == "ok"]
    last = {(run.row["config"]["precision"], run.optimizer, run.seed): run for run in complete}
    choices: dict[tuple[str, str], list[Curve]] = {}
    for precision, optimizer, seed in sorted(last, key=lambda key: (key[0] != "bf16", *key)):
        choices.setdefault((precision, optimizer), []).append(last[precision, optimizer, seed])
    return choices


def reach_cells(runs: list[Curve], baselines: dict[int, Curve]) -> list[str]:
    """Return the million tokens to the last loss of each run's baseline, their share of the baseline's; then minutes.

    The baseline is the run of the same seed. If a run does not reach the loss, the first cell says how many do.
    """
    pairs = [(run, baselines[run.seed]) for run in runs if run.seed in baselines]
    steps = [run.steps_to(base.last) for run, base in pairs]
    if not pairs or None in steps:
        return [f"{len(pairs) - steps.count(None)} of {len(pairs)} seeds reach it", "", "", ""]
    own_steps = mean(base.steps_to(base.last) for _, base in pairs)
    millions = runs[0].row["config"]["train"]["tokens_per_step"] / 1e6
    cells = [f"{mean(steps) * millions:.1f}", f"{mean(steps) / own_steps:.2f}"]
    minutes = [(run.minutes_to(base.last), base.minutes_to(base.last)) for run, base in pairs]
    if any(None in pair for pair in minutes):
        return [*cells, "", ""]
    own, baseline = map(mean, zip(*minutes, strict=True))
    return [*cells, f"{own:.2f}", f"{own / baseline:.2f}"]


def optimizer_figures(runs: list[Curve], y: str) -> list[Figure | None]:
    """Return the losses over tokens and over minutes: the mean over the seeds, with a band from lowest to highest.

    A figure without points is None.
    """
    units: dict[str, Callable[[Curve], float | None]] = {
        "million tokens": lambda run: run.row["config"]["train"]["tokens_per_step"] / 1e6,
        "minutes": lambda run: run.minutes_per_step,
    }
    figures = []
    for unit, per_step in units.items():
        series = []
        for (choice, seeds), colour in zip(by_optimizer(runs).items(), cycle(CHOICE_COLOURS), strict=False):
            scales = [per_step(run) for run in seeds]
            points = []
            for step in sorted(set.intersection(*(set(run.losses) for run in seeds))) if None not in scales else ():
                losses = [run.losses[step] for run in seeds]
                points.append(Point(step * mean(scales), mean(losses), spread=(min(losses), max(losses))))
            series.append(Series(", ".join(choice), "lines", points, colour))
        figures.append(figure(unit, y, series))
    return figures


def draw_curves(device: str, path: Path) -> list[Path]:
    """Draw the losses of each run, and below them the differences from the first run of the same seed.

    A choice has a colour, and a seed has a style of line. Return the files: none without a curve. Runs with two
    optimizers have optimizer_figures() instead.
    """
    runs = curves(device)
    y = "validation loss" if runs and runs[0].losses is runs[0].validation else "training loss"
    if len({run.optimizer for run in runs}) > 1:
        return draw_figures(optimizer_figures(runs, y), path)
    choices, seeds = list(dict.fromkeys(run.choice for run in runs)), list(dict.fromkeys(run.seed for run in runs))
    drawn = []
    for run, first in with_reference(runs):
        style = {"name": run.name, "colour": CHOICE_COLOURS[choices.index(run.choice) % len(CHOICE_COLOURS)]}
        style |= {"dash": [*LINES][seeds.index(run.seed) % len(LINES)], "width": 1}
        drawn.append(LossCurve(run.losses, first.losses, style))
    return draw_figures([loss_figure(drawn, y, "above the first of its seed")], path)
