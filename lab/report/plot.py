"""Parts that the panels share: traces, axes, and hover texts.

A figure is Plotly's JSON as plain dicts; page.js draws it. A point's `customdata`, or a trace's `meta`, is [id, hover
text]. page.js filters by the id, and looks up the command that a click copies. The filters never hide a trace without
an id.
"""

import html
import textwrap
from dataclasses import dataclass

from lab.report.choices import Choice
from runtime.console import kernel_texts

HOVER, HOVER_LINE = "%{customdata[1]}<extra></extra>", "%{meta[1]}<extra></extra>"
PREDICTION_ERROR = "error of the predicted peak {:+.1%}"


@dataclass
class Panel:
    """One card of the page."""

    id: str
    title: str
    text: str  # how to read the figure
    command: str  # measures what the figure shows
    figure: dict | None  # None if no row has what the figure shows


def scatter(mode: str, **settings) -> dict:
    """Return a trace of points or lines."""
    return {"type": "scatter", "mode": mode, "hovertemplate": HOVER, **settings}


def bars(**settings) -> dict:
    """Return a trace of horizontal bars."""
    return {"type": "bar", "orientation": "h", "hovertemplate": HOVER, **settings}


def figure(traces: list[dict], x: str, y: str = "", row_height: int | None = None, **layout) -> dict:
    """Return the figure of these traces, with titles for its axes.

    A figure with `row_height` has one row of that many pixels for each category on its y axis, the first on top.
    """
    xaxis, yaxis = {"title": {"text": x}}, {"title": {"text": y}}
    if row_height:
        yaxis |= {"autorange": "reversed", "type": "category"}
        xaxis |= {"rangemode": "tozero"}
    return {"data": traces, "layout": {"xaxis": xaxis, "yaxis": yaxis, **layout}, "row": row_height}


def escape(text: str) -> str:
    """Return a text of a row as HTML for Plotly, for which a formula would stand between two $."""
    return html.escape(text).replace("$", "&#36;")


def wrap(text: str, width: int, **options) -> list[str]:
    """Return the lines of a text, 12 at most: a row's name or command may have any length."""
    return textwrap.wrap(text[: 13 * width], width, max_lines=12, placeholder=" ...", **options)


def hover_text(lines: list[str], command: str) -> str:
    """Return HTML for Plotly: the lines, the first in bold, and the command in italics."""
    title, *rest = [escape(part) for line in lines for part in wrap(line, 58)] or [""]
    command_lines = [f"<i>{escape(part)}</i>" for part in wrap(command, 54, break_on_hyphens=False)]
    return "<br>".join([f"<b>{title}</b>", *rest, "", *command_lines])


def format_values(values: dict[str, float | str | None]) -> list[str]:
    """Format each value by its key, a template such as "{:.1f} ms a step"; leave out values of None."""
    return [template.format(value) for template, value in values.items() if value is not None]


def axis_label(choice: Choice) -> str:
    """Return a choice's label on an axis, in short lines: kernels, attention, qualifier."""
    kernels, _, attention = choice.name.partition(" · ")
    lines = [*wrap(kernels, 24), *wrap(f"{attention} {choice.qualifier}".strip(), 26)]
    return "<br>".join(map(escape, lines))


def choice_hover(choice: Choice) -> str:
    """Return all figures of a choice, and the command that runs it again."""
    row, lines = choice.row, [choice.title]
    if choice.speed:
        runs = f", {len(choice.speeds)} runs" if len(choice.speeds) > 1 else ""
        low, high = choice.spread
        lines.append(f"{choice.speed:,.0f} tokens/s ({low:,.0f} to {high:,.0f}){runs}")
    if choice.comparison:
        lines.append(choice.comparison_text if choice.is_baseline else str(choice.comparison))
    keys = {"{:.1f} ms a step": "perf/step_ms", "MFU {:.1%}": "perf/mfu", "first step {:.1f} s": "perf/first_step_s"}
    keys |= {"{} caches": "perf/cache", "{} recompilations": "perf/recompiles", "{} graph breaks": "perf/graph_breaks"}
    keys |= {"{:.3f} ms a step": "gen/step_ms", "{:.1%} of the bound": "gen/bandwidth_utilisation"}
    keys |= {"first token {:.1f} ms": "gen/ttft_ms", "start {:.1f} s": "gen/warmup_s"}
    lines.append(", ".join(format_values({template: row.get(key) for template, key in keys.items()})))
    peak = "peak {:.2f} GiB" if choice.generates else "peak {:.1f} GiB"
    lines += format_values({peak: choice.memory})
    return hover_text(
        [*lines, parity_text(row), proof_text(row), " | ".join(kernel_texts(row).values())], choice.command
    )


def parity_text(row: dict) -> str:
    """Return whether parity holds, with its errors and their bounds; empty if the row has no parity."""
    parity = row.get("parity")
    if not parity:
        return ""
    if parity.get("ok") is None:
        return f"parity not compared: {parity['why']}"
    pairs = [(name, parity.get(f"{name}_error"), parity.get(f"{name}_bound")) for name in ("loss", "gradient")]
    errors = [f"{name} {error:.1e} (bound {bound:.1e})" for name, error, bound in pairs if None not in (error, bound)]
    return f"parity {'holds' if parity['ok'] else 'FAILS'}: {', '.join(errors)}"


def proof_text(row: dict) -> str:
    """Return what the proof of a generation found; empty if the row has none."""
    proof = row.get("proof")
    if not proof:
        return ""
    errors = f"logits {proof['logits_error']:.1e} (bound {proof['logits_bound']:.1e}), {proof['ties']} ties"
    if proof["ok"] is None:
        return f"not exact: {proof['why']}; {errors}"
    return f"proof {'holds' if proof['ok'] else 'FAILS'}: {proof['tokens']:,} tokens, {errors}"
