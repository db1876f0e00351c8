"""The panels of generation: speed against batch and against context, and the time of a step by families of kernels."""

from collections.abc import Callable
from typing import NamedTuple

from lab.report.bench_panels import octave_ticks
from lab.report.choices import Choice, identifying_settings
from lab.report.colours import SYMBOLS
from lab.report.describe import prompt_tokens
from lab.report.panels import families_figure
from lab.report.plot import Panel, choice_hover, escape, figure, scatter
from lab.report.source import ReportSource
from lab.sweep.compare import sequences

COMMAND = "python -m scripts.generate +sweep=generate checkpoint=random"
CPU_COMMAND = "python -m scripts.generate -m checkpoint=random model=tiny prompt_tokens=64 batch=1,8 proof=true"
TEXT = {
    "batches": ("Generation: speed against batch", "New tokens a second, of all sequences together."),
    "prompts": ("Generation: speed against context", "New tokens a second, after prompts of this length."),
    "decoding": ("Where the time of a decoding step goes", "One profiled step. Idle: no kernel runs."),
}


class Line(NamedTuple):
    """The choices of one line, which differ only in the setting of the x axis. `settings` are the other settings."""

    name: str
    settings: dict[str, str]
    choices: list[Choice]


def generation_panels(source: ReportSource, colours: dict[str, str]) -> list[Panel]:
    choices = source.measured_generations
    figures = {
        "batches": speed_figure(choices, colours, "batch", sequences, "sequences"),
        "prompts": speed_figure(choices, colours, "prompt", prompt_tokens, "tokens of the prompt"),
        "decoding": families_figure(choices),
    }
    command = CPU_COMMAND if source.on_cpu else COMMAND
    return [Panel(name, *TEXT[name], command, drawing) for name, drawing in figures.items()]


def speed_figure(
    choices: list[Choice], colours: dict[str, str], setting: str, value: Callable[[dict], int], title: str
) -> dict | None:
    """Draw the tokens/s over the setting that identifying_settings() calls `setting`. value(row) is its number.

    A line needs two values of the setting. Lines of one colour have different symbols. Returns None without a line.
    """
    lines = [line for line in speed_lines(choices, setting) if len({value(choice.row) for choice in line.choices}) > 1]
    traces, used = [], []
    for line in lines:
        points = sorted(line.choices, key=lambda choice: value(choice.row))
        colour = colours[line.name]
        symbol = SYMBOLS[used.count(colour) % len(SYMBOLS)]
        used.append(colour)
        traces.append(
            scatter(
                "lines+markers",
                name=escape(line_label(line, lines)),
                x=[value(choice.row) for choice in points],
                y=[choice.speed for choice in points],
                line={"color": colour, "width": 2},
                marker={"size": 9, "color": colour, "symbol": symbol},
                customdata=[[choice.id, choice_hover(choice)] for choice in points],
            )
        )
    if not traces:
        return None
    drawing = figure(traces, title, "tokens/s")
    drawing["layout"]["xaxis"] |= {"type": "log", **octave_ticks(traces)}
    drawing["layout"]["yaxis"] |= {"type": "log", "dtick": "D2"}
    return drawing


def speed_lines(choices: list[Choice], setting: str) -> list[Line]:
    """Return the lines over this setting, in the order of their first choices."""
    lines: dict[tuple[str, ...], Line] = {}
    for choice in choices:
        settings = {key: text for key, text in identifying_settings(choice).items() if key not in (setting, "id")}
        line = lines.setdefault((choice.name, *settings.values()), Line(choice.name, settings, []))
        line.choices.append(choice)
    return list(lines.values())


def line_label(line: Line, lines: list[Line]) -> str:
    """Return the line's name, with the settings that vary among the lines of this name."""
    same_name = [other.settings for other in lines if other.name == line.name]
    varying = [text for key, text in line.settings.items() if len({settings[key] for settings in same_name}) > 1]
    return " · ".join([line.name, *filter(None, varying)])
