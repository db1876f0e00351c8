"""The figures of choices: speed, memory, families of kernels, losses, and when a longer start pays off."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lab.report.choice_table import choice_columns
from lab.report.choices import Choice, comparable_groups, identifying_settings
from lab.report.colours import GREY, GRID, INK, QUIET, SYMBOLS, choice_dashes, choice_symbols, part_colours
from lab.report.describe import prompt_tokens
from lab.report.plot import (
    Figure,
    Panel,
    Point,
    Series,
    figure,
    hover_text,
    line,
    wrap,
)
from lab.report.source import ReportSource
from lab.sweep.compare import sequences
from runtime.console import kernel_texts

Losses = dict[int, float]  # step -> loss
MEMORY_PARTS = "weights", "gradients", "optimizer", "activations", "workspace"
MEMORY_NAMES = {"workspace": "logits and workspace", "peak": "peak, not split"}
MEMORY_SIDES = {"predicted": 0.5, "measured": 1.0}  # the opacity of their bars
GENERATE = "python -m scripts.generate +sweep=generate checkpoint=random"
GENERATE_ON_CPU = "python -m scripts.generate -m checkpoint=random model=tiny prompt_tokens=64 batch=1,8 proof=true"
TEXT = {
    "speed": ("Speed", "Tokens a second. The whiskers are p20 to p80 of one run, or the range of several runs."),
    "memory": (
        "Memory",
        "Peak GiB of tensors. The upper, pale bar is predicted. The lower bar is measured, which needs a GPU. The "
        "percentage is the prediction's error.",
    ),
    "tradeoff": ("Speed against memory", "A ring: no other choice at its settings is faster in as little memory."),
    "families": ("Where the step's time goes", "One profiled step by families of kernels. Idle: no kernel runs."),
    "parity": ("Do they train alike?", "The training loss, and below it the difference from the reference (dashed)."),
    "payback": (
        "When a longer start pays off",
        "Seconds since the start. A ring marks the step from which on a choice is ahead of its baseline.",
    ),
    "batches": ("Generation: speed against batch", "New tokens a second, of all sequences together."),
    "prompts": ("Generation: speed against context", "New tokens a second, after prompts of this length."),
    "decoding": ("Where the time of a decoding step goes", "One profiled step. Idle: no kernel runs."),
}


def choice_panels(source: ReportSource, colours: dict[str, str]) -> list[Panel]:
    """Return the panels of training and of generation."""
    train = "python train.py " + ("+experiment=throughput kernels=compile" if source.from_results else "+sweep=kernels")
    if source.on_cpu:
        train = "python train.py -m +experiment=smoke kernels=eager,compile proof=true"
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
    generate = GENERATE_ON_CPU if source.on_cpu else GENERATE
    panels = [Panel(name, *TEXT[name], train, each) for name, each in training.items()]
    return panels + [Panel(name, *TEXT[name], generate, each) for name, each in generation.items()]


def choice_point(choice: Choice, x: float, y: float | str, hover: str | None = None, **style) -> Point:
    """Return a point of a choice. Its hover text is choice_hover() unless it is given."""
    return Point(x, y, choice.id, choice_hover(choice) if hover is None else hover, **style)


def choice_hover(choice: Choice) -> str:
    """Return all figures of a choice, and the command that runs it again."""
    cells = [
        f"{name} {cell(choice)}" for name, cell in choice_columns([choice], hover=True).items() if name != "choice"
    ]
    lines = [choice.title, ", ".join(cells), " | ".join(kernel_texts(choice.row).values())]
    return hover_text(lines, choice.command)


def axis_label(choice: Choice) -> str:
    """Return a choice's label on an axis, in short lines: kernels, attention, qualifier."""
    kernels, _, attention = choice.name.partition(" · ")
    return "\n".join([*wrap(kernels, 24), *wrap(f"{attention} {choice.qualifier}".strip(), 26)])


def speed_figure(choices: list[Choice], colours: dict[str, str]) -> Figure | None:
    """Return the tokens/s and the spread of each choice. The names of other settings are on a line of their own."""
    points = []
    for choice in choices:
        ratio = choice.comparison_text.split(": ")[0].replace("), other", ")\nother")
        text = f"{choice.speed:,.0f}\n{ratio}"
        style = {"text": text, "colour": colours[choice.name], "spread": choice.spread}
        points.append(choice_point(choice, choice.speed, axis_label(choice), **style))
    return figure("tokens/s", "", [Series("", "bars", points)], row=52)


def peak_figure(choices: list[Choice], colours: dict[str, str]) -> Figure | None:
    points = [
        Point(choice.memory or 0, axis_label(choice), choice.id, colour=colours[choice.name]) for choice in choices
    ]
    return figure("GiB at the peak", "", [Series("", "bars", points)], row=52)


def memory_figure(choices: list[Choice]) -> Figure | None:
    """Return the parts of the peak, predicted beside measured. A row that has only a peak gets one grey bar."""
    parts, errors = [*MEMORY_PARTS, "peak"], []
    bars: dict[tuple[str, str], list[Point]] = {(part, side): [] for part in parts for side in MEMORY_SIDES}
    for choice in choices:
        splits = {side: split for side, split in (choice.row.get("memory") or {}).items() if (split or {}).get("peak")}
        peaks = {side: splits[side]["peak"] for side in MEMORY_SIDES if side in splits}
        error = f"{peaks['predicted'] / peaks['measured'] - 1:+.1%}" if len(peaks) == 2 else ""
        for side, peak in peaks.items():
            gib = {part: splits[side][part] for part in MEMORY_PARTS if splits[side].get(part)} or {"peak": peak}
            for part, size in gib.items():
                lines = [f"{MEMORY_NAMES.get(part, part)}: {size:.2f} GiB, {side}, of {peak:.2f}", choice.title]
                hover = hover_text([*lines, error and f"error of the predicted peak {error}"], choice.command)
                bars[part, side].append(choice_point(choice, size, axis_label(choice), hover))
        if error:
            errors.append(choice_point(choice, max(peaks.values()), axis_label(choice), "", text=f" {error}"))
    if not any(points for (part, _), points in bars.items() if part != "peak"):
        return None
    series, fills = [], part_colours(MEMORY_PARTS)
    for (part, side), points in bars.items():
        style = {"colour": fills.get(part, GREY), "side": side, "opacity": MEMORY_SIDES[side]}
        series.append(Series(MEMORY_NAMES.get(part, part), "bars", points, **style))
    return figure("GiB", "", [*series, Series("", "text", errors, side="middle right", legend=False)], row=60)


def tradeoff_figure(choices: list[Choice], colours: dict[str, str]) -> Figure | None:
    """Return tokens/s over GiB, and the Pareto front of each group of comparable choices."""
    choices = [choice for choice in choices if choice.memory]
    fronts = [pareto_front(group) for group in comparable_groups(choices)]
    best = {choice.id for front in fronts for choice in front}
    style = {"colour": QUIET, "dash": "dot", "width": 1.5, "legend": False}
    series = [
        line("", {choice.memory: choice.speed for choice in front}, line=(front[0].id, ""), **style)
        for front in fronts
        if len(front) > 1
    ]
    for name, symbol in choice_symbols(choice.name for choice in choices).items():
        points = [
            choice_point(choice, choice.memory, choice.speed, symbol=symbol, ring=3 if choice.id in best else 0)
            for choice in choices
            if choice.name == name
        ]
        series.append(Series(name, "markers", points, colours[name], size=14, ring_colour=INK))
    return figure("peak GiB", "tokens/s", series)


def pareto_front(choices: list[Choice]) -> list[Choice]:
    """Return the choices for which no other choice is faster in as little memory, the smallest memory first."""
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.memory, -choice.speed)):
        if not front or choice.speed > front[-1].speed:
            front.append(choice)
    return front


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
                hover = family_hover(choice, family, ms)
                points.setdefault(family, []).append(choice_point(choice, ms, axis_label(choice), hover))
    order = [family for family, _ in total.most_common()]
    fills = part_colours(order)
    series = [Series(name, "bars", points.get(name, []), fills.get(name, GRID)) for name in [*order, "idle"]]
    return figure("ms", "", series, row=44)


def family_hover(choice: Choice, family: str, ms: float) -> str:
    """Return a family's time, and the kernels that took most of it."""
    receipt = choice.row["receipt"]
    step_ms = receipt.get("step_ms") or sum(receipt["families"].values())
    lines = [f"{family}: {ms:.3g} ms of {step_ms:.4g} ({ms / step_ms:.0%})", choice.title]
    kernels = [kernel for kernel in receipt.get("kernels") or [] if kernel["family"] == family]
    lines += [f"{kernel['ms']:.3g} ms, {kernel['calls']:g} x {kernel['name'][:40]}" for kernel in kernels[:5]]
    return hover_text(lines, choice.command)


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
    """Return the losses of each choice and of the reference, and below them the differences."""
    references: dict[tuple, LossCurve] = {}
    curves, dashes = [], choice_dashes(choice.name for choice in choices)
    for choice, losses, reference, name in loss_curves(choices):
        style = {"name": f"reference: {name}", "dash": "dash", "width": 1.5, "line": (choice.id, "reference")}
        style["template"] = "%{y:.4f}<br>"
        key = choice.model, choice.precision, *reference.values()
        references.setdefault(key, LossCurve(reference, reference, style))
        if losses is not reference:
            style = {"name": choice.name, "colour": colours[choice.name], "dash": dashes[choice.name]}
            style |= {"line": (choice.id, choice_hover(choice)), "template": "%{y:.4f}<br>"}
            curves.append(LossCurve(losses, reference, style))
    return loss_figure([*curves, *references.values()], "loss", "difference") if curves else None


def loss_curves(choices: list[Choice]) -> list[tuple[Choice, Losses, Losses, str]]:
    """Return (choice, its losses, the reference's losses, the reference's name).

    The losses are from the rows' parity, and the reference is eager in fp32. If no row has parity, they are the
    training losses. Then the reference is the eager choice of the same model and precision, or, if none is eager, the
    first choice of them.
    """
    curves = []
    for choice in choices:
        parities = [row["parity"] for row in choice.rows if (row.get("parity") or {}).get("losses")]
        if parities:
            losses, reference = (dict(enumerate(parities[0][key], 1)) for key in ("losses", "reference"))
            curves.append((choice, losses, reference, "eager in fp32"))
    if curves:
        return curves
    trained = [choice for choice in choices if len(choice.losses) > 1]
    for choice in trained:
        peers = [peer for peer in trained if (peer.model, peer.precision) == (choice.model, choice.precision)]
        base = next((peer for peer in peers if peer.name.startswith("eager ·")), peers[0])
        curves.append((choice, choice.losses, base.losses, base.name))
    return curves if len(curves) > 1 else []


def payback_figure(choices: list[Choice], colours: dict[str, str]) -> Figure | None:
    """Return the seconds since the start over steps, and a ring where a choice overtakes its baseline."""
    series, dashes = [], choice_dashes(choice.name for choice in choices)
    for group in comparable_groups([choice for choice in choices if choice.row.get("perf/first_step_s") is not None]):
        if len(group) < 2 or not any(choice.is_baseline for choice in group):
            continue
        paybacks = {choice.id: choice.payback() for choice in group}
        overtaking = sorted(filter(None, paybacks.values()))
        last = 1.6 * max([600, *overtaking[:3]])  # the axis shows the first three crossings, with space behind them
        for choice in sorted(group, key=lambda choice: not choice.is_baseline):
            row, colour, payback = choice.row, colours[choice.name], paybacks[choice.id]
            start, step = row["perf/first_step_s"], row["perf/step_ms"] / 1e3
            style = {"colour": colour, "dash": dashes[choice.name], "template": "%{y:.0f} s after %{x:.0f} steps<br>"}
            seconds = {last * i / 24: start + last * i / 24 * step for i in range(25)}
            series.append(line(choice.name, seconds, line=(choice.id, choice_hover(choice)), **style))
            if payback and payback <= last:
                y, base = start + payback * step, choice.comparison.base.title
                text = f"ahead of {base} after {payback:,.0f} steps, {y:,.0f} s"
                ring = choice_point(choice, payback, y, hover_text([text], choice.command), ring=2.5)
                style = {"size": 13, "ring_colour": INK, "legend": False}
                series.append(Series("crossing", "markers", [ring], colour, **style))
    return figure("steps after the first", "seconds", series)


class SpeedLine(NamedTuple):
    """The choices of one line, which differ only in the setting of the x axis. `settings` are the other settings."""

    name: str
    settings: dict[str, str]
    choices: list[Choice]


def generation_figure(
    choices: list[Choice], colours: dict[str, str], setting: str, value: Callable[[dict], int], x: str
) -> Figure | None:
    """Return the tokens/s over the setting that identifying_settings() calls `setting`. value(row) is its number.

    A line needs two values of the setting. Lines of one colour have different symbols.
    """
    found: dict[tuple[str, ...], SpeedLine] = {}
    for choice in choices:
        settings = {key: text for key, text in identifying_settings(choice).items() if key not in (setting, "id")}
        new = SpeedLine(choice.name, settings, [])
        found.setdefault((choice.name, *settings.values()), new).choices.append(choice)
    lines = [each for each in found.values() if len({value(choice.row) for choice in each.choices}) > 1]
    series, used = [], []
    for each in lines:
        colour = colours[each.name]
        symbol = SYMBOLS[used.count(colour) % len(SYMBOLS)]
        used.append(colour)
        points = [choice_point(choice, value(choice.row), choice.speed, symbol=symbol) for choice in each.choices]
        points.sort(key=lambda point: point.x)
        series.append(Series(speed_line_name(each, lines), "lines+markers", points, colour))
    return figure(x, "tokens/s", series, octaves=0.2, log={"y": "D2"})


def speed_line_name(line: SpeedLine, lines: list[SpeedLine]) -> str:
    """Return the line's name, with the settings that vary among the lines of this name."""
    same_name = [other.settings for other in lines if other.name == line.name]
    varying = [text for key, text in line.settings.items() if len({settings[key] for settings in same_name}) > 1]
    return " · ".join([line.name, *filter(None, varying)])
