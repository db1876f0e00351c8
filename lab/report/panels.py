"""The figures of choices: speed, memory, families of kernels, losses, and when a longer start pays off."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lab.report.choice_table import choice_columns
from lab.report.choices import Choice, comparable_groups, identifying_settings, varying_texts
from lab.report.colours import DASHES, GRID, INK, SYMBOLS, attention_styles, part_colours
from lab.report.describe import prompt_tokens
from lab.report.plot import Figure, Origin, Panel, Point, Series, figure, line, make_origin, wrap
from lab.report.png import draw_figures
from lab.report.source import ReportSource
from lab.sweep.compare import payback_steps, sequences
from runtime.console import kernel_texts

Losses = dict[int, float]  # step -> loss
MEMORY_PARTS = "weights", "gradients", "optimizer", "activations", "workspace"
MEMORY_SIDES = {"predicted": 0.5, "measured": 1.0}  # the opacity of their bars
GENERATE = "python -m scripts.generate +sweep=generate checkpoint=random"
TEXT = {
    "speed": ("Speed", "Tokens a second. The whiskers are p20 to p80 of one run, or the range of several runs."),
    "memory": (
        "Memory",
        "Peak GiB of tensors. The upper, pale bar is predicted. The lower bar is measured, which needs a GPU. The "
        "workspace includes the logits.",
    ),
    "tradeoff": ("Speed against memory", "Tokens a second over the peak GiB."),
    "families": ("Where the step's time goes", "One profiled step by families of kernels. Idle: no kernel runs."),
    "parity": ("Do they train alike?", "The training loss, and below it the difference from eager in fp32 (dashed)."),
    "payback": (
        "When a longer start pays off",
        "Seconds since the start. A ring marks the step from which on a choice is ahead of its baseline.",
    ),
    "batches": (
        "Generation: speed against batch",
        "New tokens a second, of all sequences together. Below: the share of the bound, the speed of only reading the "
        "weights and the KV cache.",
    ),
    "prompts": (
        "Generation: speed against context",
        "New tokens a second, after prompts of this length. Below: the share of the bound.",
    ),
    "decoding": ("Where the time of a decoding step goes", "One profiled step. Idle: no kernel runs."),
}


def choice_panels(source: ReportSource, colours: dict[str, str]) -> list[Panel]:
    """Return the panels of training and of generation."""
    train = "python train.py " + ("+experiment=throughput kernels=compile" if source.from_results else "+sweep=kernels")
    choices, generations = source.measured_choices, source.measured_generations
    training = {
        "speed": speed_figure(choices, colours),
        "memory": memory_figure(choices),
        "tradeoff": tradeoff_figure(choices, colours),
        "families": families_figure(choices),
        "parity": parity_figure(source.choices, colours),
        "payback": payback_figure(choices, colours),
    }
    generation = {
        "batches": generation_figure(generations, colours, "batch", sequences, "sequences"),
        "prompts": generation_figure(generations, colours, "prompt", prompt_tokens, "tokens of the prompt"),
        "decoding": families_figure(generations),
    }
    panels = [Panel(name, *TEXT[name], train, each) for name, each in training.items()]
    return panels + [Panel(name, *TEXT[name], GENERATE, each) for name, each in generation.items()]


def choice_origin(choice: Choice, lines: list[str] | None = None) -> Origin:
    """Return the origin of a choice's point. By default, its hover text has all figures of the choice."""
    if lines is None:
        cells = [f"{name} {cell(choice)}" for name, cell in choice_columns([choice]).items() if name != "choice"]
        lines = [choice.title, ", ".join(cells), " | ".join(kernel_texts(choice.row).values())]
    return make_origin(lines, choice.command, choice.preset, choice.precision)


def choice_point(choice: Choice, x: float, y: float | str, lines: list[str] | None = None, **style) -> Point:
    return Point(x, y, choice_origin(choice, lines), **style)


def axis_label(choice: Choice) -> str:
    """Return a choice's label on an axis, in short lines: its name, and its qualifier."""
    return "\n".join([*wrap(choice.name, 26), *wrap(choice.qualifier, 26)])


def speed_figure(choices: list[Choice], colours: dict[str, str]) -> Figure | None:
    """Return the tokens/s and the spread of each choice."""
    points = []
    for choice in choices:
        style = {"text": f"{choice.speed:,.0f}\n{choice.ratio_text}".strip(), "spread": choice.spread}
        style["colour"] = colours[choice.colour_key]
        points.append(choice_point(choice, choice.speed, axis_label(choice), **style))
    return figure("tokens/s", "", [Series("", "bars", points)], row=52)


def draw_speeds(choices: list[Choice], colours: dict[str, str], path: Path) -> list[Path]:
    """Draw tokens/s and peak memory of each choice, the first choice on top. Return the files."""
    peaks = [Point(choice.memory or 0, axis_label(choice), colour=colours[choice.colour_key]) for choice in choices]
    peak_figure = figure("GiB at the peak", "", [Series("", "bars", peaks)], row=52)
    return draw_figures([speed_figure(choices, colours), peak_figure], path)


def memory_figure(choices: list[Choice]) -> Figure | None:
    """Return the parts of the peak, predicted beside measured."""
    bars: dict[tuple[str, str], list[Point]] = {(part, side): [] for part in MEMORY_PARTS for side in MEMORY_SIDES}
    for choice in choices:
        memory = choice.row.get("memory") or {}
        for (part, side), points in bars.items():
            split = memory.get(side) or {}
            if split.get(part):
                lines = [f"{part}: {split[part]:.2f} GiB, {side}, of {split['peak']:.2f}", choice.title]
                points.append(choice_point(choice, split[part], axis_label(choice), lines))
    series, fills = [], part_colours(MEMORY_PARTS)
    for (part, side), points in bars.items():
        series.append(Series(part, "bars", points, fills[part], side=side, opacity=MEMORY_SIDES[side]))
    return figure("GiB", "", series, row=60, categories=list(map(axis_label, choices)))


def tradeoff_figure(choices: list[Choice], colours: dict[str, str]) -> Figure | None:
    """Return tokens/s over GiB."""
    series = []
    for name, symbol in attention_styles((choice.name for choice in choices), SYMBOLS).items():
        shown = [choice for choice in choices if choice.name == name and choice.memory]
        for key in dict.fromkeys(choice.colour_key for choice in shown):
            own = [choice for choice in shown if choice.colour_key == key]
            points = [choice_point(choice, choice.memory, choice.speed, symbol=symbol) for choice in own]
            label = name if key == name else f"{name}, {key}"
            series.append(Series(label, "markers", points, colours[key], size=14))
    return figure("peak GiB", "tokens/s", series)


def families_figure(choices: list[Choice]) -> Figure | None:
    """Return the profiled step of each choice by families of kernels, and the time in which the device was idle."""
    points: dict[str, list[Point]] = {}
    total: Counter[str] = Counter()
    for choice in choices:
        receipt = choice.row.get("receipt") or {}
        families = receipt.get("families") or {}
        total.update(families)
        idle = max((receipt.get("step_ms") or 0) - (receipt.get("busy_ms") or 0), 0.0) if families else 0
        for family, ms in [*families.items(), ("idle", idle)]:
            if ms:
                lines = [f"{family}: {ms:.3g} ms", choice.title]
                points.setdefault(family, []).append(choice_point(choice, ms, axis_label(choice), lines))
    order = [family for family, _ in total.most_common()]
    fills = part_colours(order)
    series = [Series(name, "bars", points.get(name, []), fills.get(name, GRID)) for name in [*order, "idle"]]
    return figure("ms", "", series, row=52, categories=list(map(axis_label, choices)))


class LossCurve(NamedTuple):
    """Losses beside those of a reference, which may be the same; then no difference is drawn."""

    losses: Losses
    reference: Losses
    style: dict  # of its lines: settings of Series


def loss_figure(curves: list[LossCurve], y: str, y_below: str) -> Figure | None:
    """Return the losses over the steps, and below them the differences from their references."""
    above, below = [], []
    for losses, reference, style in curves:
        above.append(line(values=losses, **style))
        if losses is not reference:
            gaps = {step: losses[step] - reference[step] for step in sorted(losses.keys() & reference.keys())}
            below.append(line(values=gaps, **style))
    return figure("step", y, above, below=[each for each in below if each.points], y_below=y_below)


def parity_figure(choices: list[Choice], colours: dict[str, str]) -> Figure | None:
    """Return the losses of each choice and of eager in fp32, and below them the differences."""
    references: dict[tuple, LossCurve] = {}
    curves, dashes = [], attention_styles((choice.name for choice in choices), DASHES)
    for choice in choices:
        parities = [row["parity"] for row in choice.rows if (row.get("parity") or {}).get("losses")]
        if not parities:
            continue
        losses, reference = (dict(enumerate(parities[0][key], 1)) for key in ("losses", "reference"))
        style = {"name": "reference: eager in fp32", "dash": "dash", "width": 1.5}
        style["origin"] = Origin("reference", "", choice.preset, choice.precision)
        key = choice.preset, choice.precision, *reference.values()
        references.setdefault(key, LossCurve(reference, reference, style))
        style = {"name": choice.name, "colour": colours[choice.colour_key], "dash": dashes[choice.name]}
        style["origin"] = choice_origin(choice)
        curves.append(LossCurve(losses, reference, style))
    return loss_figure([*curves, *references.values()], "loss", "difference")


def payback_figure(choices: list[Choice], colours: dict[str, str]) -> Figure | None:
    """Return the seconds since the start over steps, and a ring where a choice overtakes its baseline."""
    series, dashes = [], attention_styles((choice.name for choice in choices), DASHES)
    for group in comparable_groups([choice for choice in choices if choice.row.get("perf/first_step_s") is not None]):
        base = next((choice for choice in group if choice.base is choice), None)
        if base is None or len(group) < 2:
            continue
        paybacks = [payback_steps(choice.row, base.row) for choice in group]
        overtaking = sorted(filter(None, paybacks))
        last = 1.6 * max([600, *overtaking[:3]])  # the axis shows the first three crossings, with space behind them
        for choice, payback in zip(group, paybacks, strict=True):
            start, step = choice.row["perf/first_step_s"], choice.row["perf/step_ms"] / 1e3
            style = {"colour": colours[choice.colour_key], "dash": dashes[choice.name], "origin": choice_origin(choice)}
            seconds = {last * i / 24: start + last * i / 24 * step for i in range(25)}
            series.append(line(choice.name, seconds, **style))
            if payback and payback <= last:
                y = start + payback * step
                lines = [f"ahead of {base.title} after {payback:,.0f} steps, {y:,.0f} s"]
                ring = choice_point(choice, payback, y, lines, ring=2.5)
                series.append(Series("", "markers", [ring], colours[choice.colour_key], size=13, ring_colour=INK))
    return figure("steps after the first", "seconds", series)


def generation_figure(
    choices: list[Choice], colours: dict[str, str], setting: str, value: Callable[[dict], int], x: str
) -> Figure | None:
    """Return the tokens/s, and below it the share of the bound, over a setting. value(row) is its number.

    `setting` is its name in identifying_settings(). A line needs two values. Lines of one colour differ in symbols.
    """
    settings = [identifying_settings(choice) for choice in choices]
    titles = [choice.name for choice in choices]
    for key in settings[0] if settings else ():
        if key not in (setting, "number"):
            texts = varying_texts(titles, [each[key] for each in settings])
            titles = [" · ".join(filter(None, pair)) for pair in zip(titles, texts, strict=True)]
    lines: dict[str, list[Choice]] = {}
    for title, choice in zip(titles, choices, strict=True):
        lines.setdefault(title, []).append(choice)
    series, shares, used = [], [], []
    for title, members in lines.items():
        if len({value(choice.row) for choice in members}) > 1:
            colour = colours[members[0].colour_key]
            symbol = SYMBOLS[used.count(colour) % len(SYMBOLS)]
            used.append(colour)
            members = sorted(members, key=lambda choice: value(choice.row))
            points = [choice_point(choice, value(choice.row), choice.speed, symbol=symbol) for choice in members]
            series.append(Series(title, "lines+markers", points, colour))
            bounds = [(choice, choice.row.get("gen/bandwidth_utilisation")) for choice in members]
            points = [
                choice_point(choice, value(choice.row), 100 * share, symbol=symbol) for choice, share in bounds if share
            ]
            if points:
                shares.append(Series(title, "lines+markers", points, colour))
    return figure(x, "tokens/s", series, below=shares, y_below="% of the bound", octaves=0.2, log={"y": "D2"})
