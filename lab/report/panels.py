"""The panels of training: Plotly figures of choices."""

from collections import Counter

from lab.report.choices import Choice, comparable_groups
from lab.report.colours import GREY, GRID, INK, QUIET, choice_symbols, part_colours, text_colour
from lab.report.curve_panels import parity_figure, payback_figure
from lab.report.plot import (
    PREDICTION_ERROR,
    Panel,
    axis_label,
    bars,
    choice_hover,
    escape,
    figure,
    format_values,
    hover_text,
    scatter,
)
from lab.report.source import ReportSource

MEMORY_PARTS = "weights", "gradients", "optimizer", "activations", "workspace"
MEMORY_NAMES = {"workspace": "logits and workspace", "peak": "peak, not split"}
MEMORY_SIDES = {"predicted": 0.5, "measured": 1.0}  # the opacity of their bars
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
}


def training_panels(source: ReportSource, colours: dict[str, str]) -> list[Panel]:
    arguments = "+experiment=throughput kernels=compile" if source.from_results else "+sweep=kernels"
    if source.on_cpu:
        arguments = "-m +experiment=smoke kernels=eager,compile proof=true"
    choices = source.measured_choices
    figures = {
        "speed": speed_figure(choices, colours),
        "memory": memory_figure(choices),
        "tradeoff": tradeoff_figure(choices, colours),
        "families": families_figure(choices),
        "parity": parity_figure(source.choices, colours),
        "payback": payback_figure(choices, colours),
    }
    return [Panel(name, *TEXT[name], f"python train.py {arguments}", drawing) for name, drawing in figures.items()]


def speed_figure(choices: list[Choice], colours: dict[str, str]) -> dict | None:
    """Draw the tokens/s and the spread of each choice."""
    if not choices:
        return None
    fills = [colours[choice.name] for choice in choices]
    spread = {
        "array": [choice.spread[1] - choice.speed for choice in choices],
        "arrayminus": [choice.speed - choice.spread[0] for choice in choices],
    }
    trace = bars(
        y=[axis_label(choice) for choice in choices],
        x=[choice.speed for choice in choices],
        error_x={**spread, "type": "data", "symmetric": False, "color": INK, "thickness": 1, "width": 3},
        text=[f"<b>{choice.speed:,.0f}</b><br>{bar_text(choice)}" for choice in choices],
        textposition="auto",
        insidetextanchor="start",
        textangle=0,
        constraintext="none",
        insidetextfont={"color": [text_colour(fill) for fill in fills]},
        marker={"color": fills},
        customdata=[[choice.id, choice_hover(choice)] for choice in choices],
    )
    return figure([trace], "tokens/s", row_height=52)


def bar_text(choice: Choice) -> str:
    """Return a choice's ratio; the names of other settings go to a second line."""
    return escape(choice.comparison_text.split(": ")[0]).replace("), other", ")<br>other")


def memory_split(choice: Choice, side: str) -> dict:
    """Return the GiB of each part and of the peak; `side` is "predicted" or "measured". Empty if the row has none."""
    return (choice.row.get("memory") or {}).get(side) or {}


def memory_figure(choices: list[Choice]) -> dict | None:
    """Draw the parts of the peak, predicted beside measured. A row that has only a peak gets one grey bar."""
    splits = [(choice, side, memory_split(choice, side)) for choice in choices for side in MEMORY_SIDES]
    splits = [(choice, side, split) for choice, side, split in splits if split.get("peak")]
    if all(drawn_parts(split) == ["peak"] for *_, split in splits):
        return None
    traces, colours = [], part_colours(MEMORY_PARTS)
    for part in (*MEMORY_PARTS, "peak"):
        for side, opacity in MEMORY_SIDES.items():
            same_side = [(choice, split) for choice, split_side, split in splits if split_side == side]
            pairs = [(choice, split) for choice, split in same_side if part in drawn_parts(split)]
            if pairs:
                marker = {"color": colours.get(part, GREY), "opacity": opacity}
                traces.append(memory_bars(part, side, pairs) | {"marker": marker})
    predicted = [choice for choice in choices if peak_error(choice) is not None]
    if predicted:
        traces.append(error_labels(predicted))
    return figure(traces, "GiB", row_height=60, barmode="stack", margin={"r": 48})


def drawn_parts(split: dict) -> list[str]:
    """Return the parts of memory that get a bar: the peak only if the row has no parts."""
    return [part for part in MEMORY_PARTS if split.get(part)] or ["peak"]


def memory_bars(part: str, side: str, splits: list[tuple[Choice, dict]]) -> dict:
    """Return a trace with one part of each choice's memory, predicted or measured."""
    name, hovers = MEMORY_NAMES.get(part, part), []
    for choice, split in splits:
        lines = [f"{name}: {split[part]:.2f} GiB, {side}, of {split['peak']:.2f}", choice.title]
        lines += format_values({PREDICTION_ERROR: peak_error(choice)})
        hovers.append([choice.id, hover_text(lines, choice.command)])
    return bars(
        name=name,
        legendgroup=part,
        offsetgroup=side,
        y=[axis_label(choice) for choice, _ in splits],
        x=[split[part] for _, split in splits],
        customdata=hovers,
    )


def error_labels(choices: list[Choice]) -> dict:
    """Return a trace with the error of each prediction, as a text beside the longer bar."""
    return scatter(
        "text",
        x=[max(memory_split(choice, side)["peak"] for side in MEMORY_SIDES) for choice in choices],
        y=[axis_label(choice) for choice in choices],
        text=[f" {peak_error(choice):+.1%}" for choice in choices],
        textposition="middle right",
        customdata=[[choice.id, ""] for choice in choices],
        hoverinfo="skip",
        cliponaxis=False,
        showlegend=False,
    )


def peak_error(choice: Choice) -> float | None:
    """Return the predicted peak over the measured peak, minus 1; None if the row lacks one of them."""
    predicted, measured = (memory_split(choice, side).get("peak") for side in ("predicted", "measured"))
    return predicted / measured - 1 if predicted and measured else None


def tradeoff_figure(choices: list[Choice], colours: dict[str, str]) -> dict | None:
    """Draw tokens/s over GiB, and the Pareto front of each group of comparable choices."""
    choices = [choice for choice in choices if choice.memory]
    if not choices:
        return None
    fronts = [pareto_front(group) for group in comparable_groups(choices)]
    best = {choice.id for front in fronts for choice in front}
    traces = [front_line(front) for front in fronts if len(front) > 1]
    for name, symbol in choice_symbols(choice.name for choice in choices).items():
        same_name = [choice for choice in choices if choice.name == name]
        marker = {"color": colours[name], "size": 14, "symbol": symbol}
        marker["line"] = {"color": INK, "width": [3 if choice.id in best else 0 for choice in same_name]}
        x, y = [choice.memory for choice in same_name], [choice.speed for choice in same_name]
        hovers = [[choice.id, choice_hover(choice)] for choice in same_name]
        traces.append(scatter("markers", name=escape(name), x=x, y=y, marker=marker, customdata=hovers))
    return figure(traces, "peak GiB", "tokens/s")


def pareto_front(choices: list[Choice]) -> list[Choice]:
    """Return the choices for which no other choice is faster in as little memory, the smallest memory first."""
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.memory, -choice.speed)):
        if not front or choice.speed > front[-1].speed:
            front.append(choice)
    return front


def front_line(front: list[Choice]) -> dict:
    x, y = [choice.memory for choice in front], [choice.speed for choice in front]
    line, meta = {"color": QUIET, "dash": "dot", "width": 1.5}, [front[0].id, ""]
    return scatter("lines", x=x, y=y, line=line, meta=meta, hoverinfo="skip", showlegend=False)


def families_figure(choices: list[Choice]) -> dict | None:
    """Draw the profiled step of each choice by families of kernels, and the time in which the device was idle."""
    times: list[tuple[Choice, dict[str, float]]] = []
    for choice in choices:
        receipt = choice.row.get("receipt") or {}
        if receipt.get("families"):
            idle = (receipt.get("step_ms") or 0) - (receipt.get("busy_ms") or 0)
            times.append((choice, receipt["families"] | {"idle": max(idle, 0.0)}))
    total = Counter()
    for _, families in times:
        total.update(families)
    del total["idle"]
    order = [family for family, _ in total.most_common()]
    traces, colours = [], part_colours(order)
    for family in [*order, "idle"]:
        pairs = [(choice, families[family]) for choice, families in times if families.get(family)]
        traces.append(
            bars(
                name=escape(family),
                y=[axis_label(choice) for choice, _ in pairs],
                x=[ms for _, ms in pairs],
                marker={"color": colours.get(family, GRID)},
                customdata=[[choice.id, family_hover(choice, family, ms)] for choice, ms in pairs],
            )
        )
    return figure(traces, "ms", row_height=44, barmode="stack") if times else None


def family_hover(choice: Choice, family: str, ms: float) -> str:
    """Return a family's time, and the kernels that took most of it."""
    receipt = choice.row["receipt"]
    step_ms = receipt.get("step_ms") or sum(receipt["families"].values())
    lines = [f"{family}: {ms:.3g} ms of {step_ms:.4g} ({ms / step_ms:.0%})", choice.title]
    kernels = [kernel for kernel in receipt.get("kernels") or [] if kernel["family"] == family]
    lines += [f"{kernel['ms']:.3g} ms, {kernel['calls']:g} x {kernel['name'][:40]}" for kernel in kernels[:5]]
    return hover_text(lines, choice.command)
