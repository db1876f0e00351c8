"""The panels of training: each from the choices to one Plotly figure, in plain dicts that page.js draws.

A point's `customdata`, or a trace's `meta`, begins with the id of what it shows, and goes on with what is said of it:
by the id page.js filters, and knows which command a click copies. What has no id stays, beside others that have.
"""

import textwrap
from collections import Counter
from dataclasses import dataclass
from html import escape

from scripts.page.choices import Choice, Source, alike
from scripts.page.colours import GRID, INK, QUIET, SYMBOLS, parts, readable

MEMORY = ("weights", "gradients", "optimizer", "activations", "workspace")
SAID, SAID_OF_LINE = "%{customdata[1]}<extra></extra>", "%{meta[1]}<extra></extra>"
SIDES = {"predicted": 0.5, "measured": 1.0}  # and how opaque they are
OFF = "the prediction of the peak is off by {:+.1%}"
TEXT = {
    "speed": ("Speed", "Tokens a second. Whiskers: p20 to p80 of one run, or the range of several."),
    "memory": (
        "Memory",
        "The GiB of the peak: predicted (pale; without torch.compile) above, measured below; how far they are apart.",
    ),
    "tradeoff": ("Speed against memory", "Ringed: no other choice at these settings is faster in as little memory."),
    "families": ("Where the step's time goes", "One profiled step by families of kernels; idle: the device waited."),
    "parity": ("Do they train alike?", "Training loss, and below its difference from the reference (dashed)."),
    "payback": ("When a longer start pays off", "Seconds since the start. Ringed: from there ahead of the baseline."),
}


@dataclass
class Panel:
    """`figure` is None where no row has what it takes; `command` brings such rows."""

    id: str
    title: str
    text: str  # how it is read
    command: str
    figure: dict | None


def panels(source: Source, colours: dict[str, str]) -> list[Panel]:
    again = "python train.py " + ("+experiment=throughput kernels=compile" if source.kept else "+sweep=kernels")
    timed = source.timed
    figures = {
        "speed": rate(timed, colours),
        "memory": memory(timed),
        "tradeoff": tradeoff(timed, colours),
        "families": families(timed),
        "parity": parity(source.choices, colours),
        "payback": payback(timed, colours),
    }
    return [Panel(key, *TEXT[key], again, figure) for key, figure in figures.items()]


def label(choice: Choice) -> str:
    """On an axis: two or three short lines."""
    kernels, _, attention = choice.name.partition(" · ")
    lines = [*textwrap.wrap(kernels, 24), *textwrap.wrap(f"{attention} {choice.apart}".strip(), 26)]
    return "<br>".join(map(escape, lines))


def hover(choice: Choice) -> str:
    """All that is to be said of a choice, and how to run it again."""
    row, lines = choice.row, [choice.title]
    if choice.speed:
        runs = f", {len(choice.speeds)} runs" if len(choice.speeds) > 1 else ""
        lines.append("{:,.0f} tokens/s ({:,.0f} to {:,.0f})".format(choice.speed, *choice.interval) + runs)
    if choice.against:
        lines.append(choice.versus if choice.against.base is choice else str(choice.against))
    facts = {"{:.1f} ms a step": "perf/step_ms", "MFU {:.1%}": "perf/mfu", "first step {:.1f} s": "perf/first_step_s"}
    facts |= {"{} caches": "perf/cache", "{} recompilations": "perf/recompiles", "{} graph breaks": "perf/graph_breaks"}
    lines.append(", ".join(known({told: row.get(key) for told, key in facts.items()})))
    lines += known({"{:.1f} GiB at the peak": choice.memory})
    lines += [agrees(row), ", ".join(f"{op} {who}" for op, who in row.get("kernels", {}).items() if op != "compile")]
    return said(lines, choice.command)


def said(lines: list[str], command: str) -> str:
    """A hover: those lines, the first of them as its title, and the command."""
    title, *rest = [escape(part) for line in lines for part in textwrap.wrap(line, 58)]
    shown = [f"<i>{escape(part)}</i>" for part in textwrap.wrap(command, 54, break_on_hyphens=False)]
    return "<br>".join([f"<b>{title}</b>", *rest, "", *shown])


def known(facts: dict[str, float | str | None]) -> list[str]:
    """What there is a value of, each in its words."""
    return [told.format(value) for told, value in facts.items() if value is not None]


def agrees(row: dict) -> str:
    """What parity found."""
    found = row.get("parity") or {}
    pairs = [(key, found.get(f"{key}_error"), found.get(f"{key}_bound")) for key in ("loss", "gradient")]
    told = [f"{key} {error:.1e} (bound {bound:.1e})" for key, error, bound in pairs if None not in (error, bound)]
    if found.get("ok") is None:
        return f"parity not compared: {found['why']}" if found else ""
    return f"parity {'holds' if found['ok'] else 'FAILS'}: {', '.join(told)}"


def axes(x: str, y: str | None = None, row: int | None = None, **layout) -> dict:
    """The frame of a figure; `row` pixels a line of a figure by choices, fastest on top."""
    found = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y or ""}}, **layout}
    if row:
        found["yaxis"] |= {"autorange": "reversed", "type": "category"}
        found["xaxis"] |= {"rangemode": "tozero"}
    return {"layout": found, "row": row}


def rate(timed: list[Choice], colours: dict[str, str]) -> dict | None:
    """Tokens/s by choice."""
    if not timed:
        return None
    fills = [colours[choice.name] for choice in timed]
    trace = {"type": "bar", "orientation": "h", "marker": {"color": fills}, "hovertemplate": SAID}
    trace |= {"y": [label(choice) for choice in timed], "x": [choice.speed for choice in timed]}
    trace["error_x"] = {
        "array": [choice.interval[1] - choice.speed for choice in timed],
        "arrayminus": [choice.speed - choice.interval[0] for choice in timed],
        "type": "data",
        "symmetric": False,
        "color": INK,
        "thickness": 1,
        "width": 3,
    }
    trace["text"] = [f"<b>{choice.speed:,.0f}</b><br>{brief(choice)}" for choice in timed]
    trace |= {"textposition": "auto", "insidetextanchor": "start", "textangle": 0, "constraintext": "none"}
    trace["insidetextfont"] = {"color": [readable(fill) for fill in fills]}
    trace["customdata"] = [[choice.id, hover(choice)] for choice in timed]
    return {"data": [trace], **axes("tokens/s", row=52)}


def brief(choice: Choice) -> str:
    """How it compares, in a bar: what else differs has a line of its own."""
    return choice.versus.split(": ")[0].replace("), other", ")<br>other")


def memory(timed: list[Choice]) -> dict | None:
    """The peak by what it holds, predicted beside measured; of a row with the peak alone that."""
    found = [(choice, side, (choice.row.get("memory") or {}).get(side) or {}) for choice in timed for side in SIDES]
    found = [each for each in found if each[2].get("peak")]
    fills, traces = parts(MEMORY), []
    if not any(split.get(part) for _, _, split in found for part in MEMORY):
        return None
    for part in (*MEMORY, "peak"):
        whole = [not any(split.get(each) for each in MEMORY) for *_, split in found]
        kept = [
            each for each, alone in zip(found, whole, strict=True) if alone == (part == "peak") and each[2].get(part)
        ]
        name = {"workspace": "logits and workspace", "peak": "peak, not split"}.get(part, part)
        for side, opacity in SIDES.items():
            mine = [(choice, split) for choice, which, split in kept if which == side]
            trace = {"type": "bar", "orientation": "h", "name": name, "legendgroup": part, "offsetgroup": side}
            trace |= {"marker": {"color": fills.get(part, "#A0A0A0"), "opacity": opacity}, "hovertemplate": SAID}
            trace |= {"y": [label(choice) for choice, _ in mine], "x": [split[part] for _, split in mine]}
            told = [f"{name}: {split[part]:.2f} GiB, {side}, of {split['peak']:.2f}" for _, split in mine]
            told = [
                [line, choice.title, *known({OFF: peak_error(choice)})]
                for (choice, _), line in zip(mine, told, strict=True)
            ]
            trace["customdata"] = [
                [each.id, said(lines, each.command)] for (each, _), lines in zip(mine, told, strict=True)
            ]
            traces.append(trace | {"showlegend": side == "measured"})
    ends = {choice.id: (choice, peak_error(choice)) for choice, *_ in found if peak_error(choice) is not None}
    note = {"type": "scatter", "mode": "text", "textposition": "middle right", "hoverinfo": "skip", "cliponaxis": False}
    note |= {"y": [label(choice) for choice, _ in ends.values()], "text": [f" {off:+.1%}" for _, off in ends.values()]}
    note["x"] = [max(split["peak"] for each, _, split in found if each.id == key) for key in ends]
    traces.append(note | {"customdata": [[key, ""] for key in ends], "showlegend": False})
    return {"data": [each for each in traces if each["x"]], **axes("GiB", row=60, barmode="stack", margin={"r": 48})}


def peak_error(choice: Choice) -> float | None:
    """Of the predicted peak, over the measured one."""
    foreseen, peak = (((choice.row.get("memory") or {}).get(side) or {}).get("peak") for side in SIDES)
    return foreseen / peak - 1 if foreseen and peak else None


def tradeoff(timed: list[Choice], colours: dict[str, str]) -> dict | None:
    """Tokens/s over GiB, and of each group of comparable choices the front (Pareto's)."""
    kept = [choice for choice in timed if choice.memory]
    if not kept:
        return None
    best = {choice.id for group in alike(kept) for choice in front(group)}
    traces, used = [], Counter()
    for group in alike(kept):
        if len(line := front(group)) > 1:
            trace = {"type": "scatter", "mode": "lines", "line": {"color": QUIET, "dash": "dot", "width": 1.5}}
            trace |= {"x": [each.memory for each in line], "y": [each.speed for each in line], "hoverinfo": "skip"}
            traces.append(trace | {"meta": [line[0].id, ""], "showlegend": False})
    for name in dict.fromkeys(choice.name for choice in kept):
        mine = [choice for choice in kept if choice.name == name]
        trace = {"type": "scatter", "mode": "markers", "name": escape(name), "hovertemplate": SAID}
        trace |= {"x": [choice.memory for choice in mine], "y": [choice.speed for choice in mine]}
        width = [3 if choice.id in best else 0 for choice in mine]
        trace["marker"] = {"color": colours[name], "size": 14, "line": {"color": INK, "width": width}}
        trace["marker"]["symbol"] = SYMBOLS[used[colours[name]] % len(SYMBOLS)]
        used[colours[name]] += 1
        traces.append(trace | {"customdata": [[choice.id, hover(choice)] for choice in mine]})
    return {"data": traces, **axes("GiB at the peak", "tokens/s")}


def front(group: list[Choice]) -> list[Choice]:
    """Those that no other beats in one without losing in the other, the leanest first."""
    kept: list[Choice] = []
    for choice in sorted(group, key=lambda each: (each.memory, -each.speed)):
        if not kept or choice.speed > kept[-1].speed:
            kept.append(choice)
    return kept


def families(timed: list[Choice]) -> dict | None:
    """The profiled step, by families of kernels."""
    found = [(choice, choice.row["receipt"]) for choice in timed if (choice.row.get("receipt") or {}).get("families")]
    if not found:
        return None
    total: dict[str, float] = {}
    for _, receipt in found:
        for family, ms in receipt["families"].items():
            total[family] = total.get(family, 0.0) + ms
    order = sorted(total, key=total.get, reverse=True)
    traces, fills = [], parts(order)
    for family in [*order, "idle"]:
        mine = []
        for choice, receipt in found:
            idle = (receipt.get("step_ms") or 0) - (receipt.get("busy_ms") or 0)
            ms = receipt["families"].get(family) if family != "idle" else max(idle, 0.0)
            mine += [(choice, ms, receipt)] * bool(ms)
        trace = {"type": "bar", "orientation": "h", "name": family, "hovertemplate": SAID}
        trace |= {"y": [label(choice) for choice, *_ in mine], "x": [ms for _, ms, _ in mine]}
        trace["marker"] = {
            "color": fills.get(family, GRID),
            "line": {"color": QUIET, "width": family == "idle"},
        }
        trace["customdata"] = [
            [choice.id, said(spent(*each, family), choice.command)] for each in mine for choice in each[:1]
        ]
        traces.append(trace)
    return {"data": traces, **axes("ms", row=44, barmode="stack")}


def spent(choice: Choice, ms: float, receipt: dict, family: str) -> list[str]:
    """Of a family: its time, and the kernels that took most of it."""
    whole = receipt.get("step_ms") or sum(receipt["families"].values())
    lines = [f"{family}: {ms:.2f} ms of {whole:.1f} ({ms / whole:.0%})", choice.title]
    mine = [each for each in receipt.get("kernels") or [] if each["family"] == family]
    return lines + [f"{each['ms']:.2f} ms, {each['calls']} x {each['name'][:40]}" for each in mine[:5]]


def parity(choices: list[Choice], colours: dict[str, str]) -> dict | None:
    """Loss a step beside the reference; without parity in the rows, training losses beside the first run's."""
    curves = []  # choice, its losses, the reference's, what that is
    for choice in choices:
        if found := next((row["parity"] for row in choice.rows if (row.get("parity") or {}).get("losses")), None):
            numbered = [dict(enumerate(found[key], 1)) for key in ("losses", "reference")]
            curves.append((choice, *numbered, "eager in fp32"))
    if not curves:
        kept = [choice for choice in choices if len(choice.losses) > 1]
        for choice in kept:
            beside = [each for each in kept if (each.model, each.precision) == (choice.model, choice.precision)]
            first = next((each for each in beside if each.name.startswith("eager ·")), beside[0])
            curves.append((choice, choice.losses, first.losses, first.name))
        curves = curves if len(curves) > 1 else []
    traces, references, drawn = [], [], set()
    for choice, mine, reference, who in curves:
        line = {"type": "scatter", "mode": "lines", "hovertemplate": f"%{{y:.4f}}<br>{SAID_OF_LINE}"}
        own = {"meta": [choice.id, hover(choice)], "name": escape(choice.name), "legendgroup": choice.name}
        own |= {"line": {"color": colours[choice.name], "width": 2}}
        steps = sorted(mine.keys() & reference.keys())
        if (curve := (choice.model, choice.precision, *reference.values())) not in drawn:
            drawn.add(curve)
            look = {
                "line": {"color": INK, "width": 1.5, "dash": "dash"},
                "hovertemplate": "%{y:.4f}<extra>reference</extra>",
            }
            mark = {"meta": [choice.id, ""], "name": f"reference: {escape(who)}"}
            references.append(line | look | mark | {"x": list(reference), "y": list(reference.values())})
        if mine is not reference:
            traces.append(line | own | {"x": list(mine), "y": list(mine.values())})
            apart = [mine[step] - reference[step] for step in steps]
            traces.append(line | own | {"x": steps, "y": apart, "yaxis": "y2", "showlegend": False})
    return {"data": traces + references, **above("step", "loss", "difference")} if traces else None


def above(x: str, upper: str, lower: str) -> dict:
    """The frame of two figures that share their x."""
    frame = axes(x, upper, yaxis2={"title": {"text": lower}, "domain": [0, 0.26], "zeroline": True, "nticks": 4})
    frame["layout"]["yaxis"] |= {"domain": [0.34, 1]}
    frame["layout"]["xaxis"] |= {"anchor": "y2"}
    return frame


def payback(timed: list[Choice], colours: dict[str, str]) -> dict | None:
    """Cumulative seconds against steps, as far as the crossings are."""
    traces = []
    for group in alike([choice for choice in timed if choice.row.get("perf/first_step_s") is not None]):
        base = next((choice for choice in group if choice.against.base is choice), None)
        paid = {choice.id: steps for choice in group if (steps := choice.payback())}
        if base is None or len(group) < 2:
            continue
        last = 1.6 * max([600, *sorted(paid.values())[:3]])
        for choice in [base, *(each for each in group if each is not base)]:
            first, each = choice.row["perf/first_step_s"], choice.row["perf/step_ms"] / 1e3
            look = {"color": colours[choice.name], "width": 2, "dash": "dash" if choice is base else "solid"}
            trace = {"type": "scatter", "mode": "lines", "name": escape(choice.name), "line": look}
            trace |= {
                "legendgroup": choice.name,
                "hovertemplate": f"%{{y:.0f}} s after %{{x:.0f}} steps<br>{SAID_OF_LINE}",
            }
            steps = [last * i / 24 for i in range(25)]
            trace |= {"x": steps, "y": [first + step * each for step in steps], "meta": [choice.id, hover(choice)]}
            traces.append(trace)
            at = paid.get(choice.id)
            if at and at <= last:
                told = f"ahead of {base.title} after {at:,.0f} steps, {first + at * each:,.0f} s"
                ring = {"type": "scatter", "mode": "markers", "legendgroup": choice.name, "showlegend": False}
                ring["marker"] = {"size": 13, "color": look["color"], "line": {"color": INK, "width": 2.5}}
                ring |= {"x": [at], "y": [first + at * each], "hovertemplate": SAID, "name": "crossing"}
                traces.append(ring | {"customdata": [[choice.id, said([told], choice.command)]]})
    return {"data": traces, **axes("steps after the first", "seconds")} if traces else None
