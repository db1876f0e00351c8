"""The runs of a folder in results/ with a loss curve: do they train alike, and how fast do they reach a loss?

Times are those of the steps alone: a run's median step, times the number of steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise, product
from pathlib import Path
from statistics import mean, stdev

from lab import rows as results
from lab.report.colours import CHOICE_COLOURS
from lab.report.describe import kernels_cell, sitting_text
from lab.report.plot import Figure, Point, Series, figure
from lab.report.png import draw_figures
from lab.report.presets import preset_of
from lab.report.questions import label, picture_colours
from lab.report.tables import markdown_table, markdown_text
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
    """Return the runs that have losses in curves/, oldest first.

    A row with fewer steps than the curve of its name is of another run. Of the other rows, the last is the curve's.
    """
    found = {}
    for row in sorted(results.read_rows(device), key=lambda row: row.get("started", "")):
        path = results.curve_file(results.RESULTS / device, row)
        lines = results.read_whole(path)
        losses = [{line["step"]: line[key] for line in lines if key in line} for key in ("train/loss", "val/loss")]
        if any(losses) and row["steps"] >= max(map(max, filter(None, losses))):
            found[path.stem] = Curve(row, path.stem, *losses)
    return [*found.values()]


def with_reference(runs: list[Curve]) -> list[tuple[Curve, Curve]]:
    """Return each run with the first run of its seed, which may be itself."""
    return [(run, next(first for first in runs if first.seed == run.seed)) for run in runs]


def by_choice(runs: list[Curve]) -> dict[str, list[Curve]]:
    """Return the name of a choice -> its complete runs, the newest of each seed."""
    choices: dict[str, dict[int, Curve]] = {}
    for run in (run for run in runs if run.row["status"] == "ok"):
        choices.setdefault(label(run.row), {})[run.seed] = run
    return {name: [*seeds.values()] for name, seeds in choices.items()}


def gaps(run: Curve, first: Curve) -> dict[int, float]:
    """Return step -> how much higher the run's loss is, for the steps that both have."""
    return {step: run.losses[step] - first.losses[step] for step in sorted(run.losses.keys() & first.losses.keys())}


def agreement(device: str) -> str:
    """Return the picture and the table of the choices that trained with the same seeds, beside the first choice.

    The rows are in results/DEVICE-agreement; if it has no curves, in results/DEVICE. The band is the lowest and the
    highest loss of the first choice's seeds at a step: a choice is in it if its mean over the seeds is.
    """
    folder = f"{device}-agreement" if curves(f"{device}-agreement") else device
    choices = by_choice(curves(folder))
    if not choices:
        return "Not measured yet: `scripts/measure.sh agreement`."
    reference = next(iter(choices.values()))
    head = [
        "choice",
        "seeds",
        "last validation loss",
        f"from {label(reference[0].row)}: mean, largest",
        "in the seeds' band",
    ]
    lines = []
    for name, runs in choices.items():
        pairs = [(run, first) for run in runs for first in reference if run.seed == first.seed]
        differences = [abs(gap) for run, first in pairs if run is not first for gap in gaps(run, first).values()]
        gap = f"{mean(differences):.4f}, {max(differences):.4f}" if differences else ""
        last = spread([run.last for run in runs], ".4f") if all(run.validation for run in runs) else ""
        lines.append([name, ", ".join(str(run.seed) for run in runs), last, gap, band_cell(runs, reference)])
    row = reference[0].row
    where = f"{row['steps']} steps on {markdown_text(sitting_text(row))}."
    where += "" if len(reference) > 1 else " One seed has no band: `scripts/measure.sh agreement` trains three."
    return f"![losses of each choice]({folder}/curves.png)\n\n{where}\n\n{markdown_table(head, lines)}"


def band_cell(runs: list[Curve], reference: list[Curve]) -> str:
    """Return the share of the steps at which the runs' mean loss is in the reference's band; "" with one seed."""
    if len(reference) < 2 or runs is reference:
        return ""
    steps = set.intersection(*(set(run.losses) for run in [*runs, *reference]))
    inside = 0
    for step in steps:
        band = [run.losses[step] for run in reference]
        inside += min(band) <= mean(run.losses[step] for run in runs) <= max(band)
    return f"{inside / len(steps):.0%} of the steps" if steps else ""


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
    """Return the figure and the table of a folder with AdamW's and Muon's runs, if it has both.

    The table has means over the seeds. The loss to reach is the last one of AdamW with the same model, precision and
    seed.
    """
    choices = by_optimizer([run for run in curves(device) if run.validation])
    if {optimizer for _, _, optimizer in choices} != {"AdamW", "Muon"}:
        return "Not measured yet."
    head = ["model", "precision", "optimizer", "seeds", "last validation loss", "tokens/s"]
    lines = []
    for choice, runs in choices.items():
        baselines = {run.seed: run for run in choices.get((*choice[:2], "AdamW"), [])}
        speeds = [speed(run.row) for run in runs if speed(run.row)]
        losses = spread([run.last for run in runs], ".4f")
        cells = [str(len(runs)), losses, f"{mean(speeds):,.0f}" if speeds else ""]
        lines.append([*choice, *cells, *reach_cells(runs, baselines)])
    head += ["million tokens to AdamW's loss", "of AdamW's", "minutes to it", "of AdamW's minutes"]
    return f"![losses over tokens and over minutes]({device}/curves.png)\n\n{markdown_table(head, lines)}"


def by_optimizer(runs: list[Curve]) -> dict[tuple[str, str, str], list[Curve]]:
    """Return (preset, precision, optimizer) -> the last complete run of each seed.

    In a preset, bf16 is first, and AdamW comes before Muon.
    """
    complete = [run for run in runs if run.row["status"] == "ok"]
    last = {(preset_of(run.row), run.row["config"]["precision"], run.optimizer, run.seed): run for run in complete}
    choices: dict[tuple[str, str, str], list[Curve]] = {}
    for preset, precision, optimizer, seed in sorted(last, key=lambda key: (key[0], key[1] != "bf16", *key)):
        choices.setdefault((preset, precision, optimizer), []).append(last[preset, precision, optimizer, seed])
    return choices


def reach_cells(runs: list[Curve], baselines: dict[int, Curve]) -> list[str]:
    """Return the million tokens to the last loss of each run's baseline, their share of the baseline's; then minutes.

    The baseline is the run of the same seed. If a run does not reach the loss, the first cell says how many do.
    """
    pairs = [(run, baselines[run.seed]) for run in runs if run.seed in baselines]
    steps = [run.steps_to(base.last) for run, base in pairs]
    if not pairs or None in steps:
        return [f"{len(pairs) - steps.count(None)} of {len(pairs)} seeds reach it", "", "", ""]
    baseline_steps = mean(base.steps_to(base.last) for _, base in pairs)
    millions = runs[0].row["config"]["train"]["tokens_per_step"] / 1e6
    cells = [f"{mean(steps) * millions:.1f}", f"{mean(steps) / baseline_steps:.2f}"]
    minutes = [(run.minutes_to(base.last), base.minutes_to(base.last)) for run, base in pairs]
    if any(None in pair for pair in minutes):
        return [*cells, "", ""]
    own, baseline = map(mean, zip(*minutes, strict=True))
    return [*cells, f"{own:.2f}", f"{own / baseline:.2f}"]


def optimizer_figures(runs: list[Curve], y: str) -> list[Figure | None]:
    """Return two figures of each model: its losses over tokens and over minutes.

    A line is the mean over the seeds, with a band from the lowest to the highest. A figure without points is None.
    """
    units: dict[str, Callable[[Curve], float | None]] = {
        "million tokens": lambda run: run.row["config"]["train"]["tokens_per_step"] / 1e6,
        "minutes": lambda run: run.minutes_per_step,
    }
    choices, figures = by_optimizer(runs), []
    for preset, (unit, per_step) in product(dict.fromkeys(preset for preset, _, _ in choices), units.items()):
        series = []
        own = {choice[1:]: seeds for choice, seeds in choices.items() if choice[0] == preset}
        for (choice, seeds), colour in zip(own.items(), cycle(CHOICE_COLOURS), strict=False):
            scales = [per_step(run) for run in seeds]
            points = []
            for step in sorted(set.intersection(*(set(run.losses) for run in seeds))) if None not in scales else ():
                losses = [run.losses[step] for run in seeds]
                points.append(Point(step * mean(scales), mean(losses), spread=(min(losses), max(losses))))
            series.append(Series(", ".join(choice), "lines", points, colour))
        figures.append(figure(unit, y, series, title=preset))
    return figures


def band_line(name: str, runs: list[dict[int, float]], colour: str) -> Series:
    """Return a line through the mean at each step that all runs have, with a band from the lowest to the highest."""
    points = []
    for step in sorted(set.intersection(*map(set, runs))) if runs else ():
        losses = [run[step] for run in runs]
        points.append(Point(step, mean(losses), spread=(min(losses), max(losses)) if len(losses) > 1 else None))
    return Series(name, "lines", points, colour, width=1)


def draw_curves(device: str, path: Path) -> list[Path]:
    """Draw the losses of each choice, and below them the differences from the first run of the same seed.

    A line is the mean over the seeds, with a band from the lowest to the highest. Return the files: none without a
    curve. Runs with two optimizers have optimizer_figures() instead.
    """
    runs = curves(device)
    y = "validation loss" if runs and runs[0].losses is runs[0].validation else "training loss"
    if len({run.optimizer for run in runs}) > 1:
        return draw_figures(optimizer_figures(runs, y), path, columns=2)
    above, below = [], []
    firsts = {run.name: first for run, first in with_reference(runs)}
    choices = by_choice(runs)
    colours = picture_colours({name: [run.row for run in each] for name, each in choices.items()})
    for name, each in choices.items():
        colour = colours[name]
        seeds = f" ({len(each)} seeds)" if len(each) > 1 else ""
        above.append(band_line(name + seeds, [run.losses for run in each], colour))
        below.append(
            band_line(name, [gaps(run, firsts[run.name]) for run in each if firsts[run.name] is not run], colour)
        )
    below = [series for series in below if series.points]
    return draw_figures([figure("step", y, above, below=below, y_below="above the first of its seed")], path)
