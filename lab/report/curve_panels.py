"""The panels with curves over steps: losses beside a reference, and when a longer start pays off."""

from lab.report.choices import Choice, comparable_groups
from lab.report.colours import INK, choice_dashes
from lab.report.plot import HOVER_LINE, choice_hover, escape, figure, hover_text, scatter

Losses = dict[int, float]  # step -> loss


def parity_figure(choices: list[Choice], colours: dict[str, str]) -> dict | None:
    """Draw the losses of each choice and of the reference, and below them the differences."""
    references, traces = {}, []
    dashes = choice_dashes(choice.name for choice in choices)
    for choice, losses, reference, reference_name in loss_curves(choices):
        style = {"hovertemplate": f"%{{y:.4f}}<br>{HOVER_LINE}", "meta": [choice.id, choice_hover(choice)]}
        style |= {"legendgroup": choice.name, "line": {"color": colours[choice.name], "width": 2}}
        style["line"]["dash"] = dashes[choice.name]
        style |= {"name": escape(choice.name)}
        curve = choice.model, choice.precision, *reference.values()
        if curve not in references:
            references[curve] = reference_line(choice, reference, reference_name)
        if losses is not reference:
            steps = sorted(losses.keys() & reference.keys())
            gaps = [losses[step] - reference[step] for step in steps]
            traces.append(scatter("lines", x=[*losses], y=[*losses.values()], **style))
            traces.append(scatter("lines", x=steps, y=gaps, yaxis="y2", showlegend=False, **style))
    if not traces:
        return None
    lower = {"title": {"text": "difference"}, "domain": [0, 0.26], "zeroline": True, "nticks": 4}
    drawing = figure([*traces, *references.values()], "step", "loss", yaxis2=lower)
    drawing["layout"]["yaxis"] |= {"domain": [0.34, 1]}
    drawing["layout"]["xaxis"] |= {"anchor": "y2"}
    return drawing


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


def reference_line(choice: Choice, losses: Losses, name: str) -> dict:
    return scatter(
        "lines",
        x=[*losses],
        y=[*losses.values()],
        name=f"reference: {escape(name)}",
        line={"color": INK, "width": 1.5, "dash": "dash"},
        hovertemplate="%{y:.4f}<extra>reference</extra>",
        meta=[choice.id, ""],
    )


def payback_figure(choices: list[Choice], colours: dict[str, str]) -> dict | None:
    """Draw the seconds since the start over steps, and a ring where a choice overtakes its baseline."""
    traces = []
    dashes = choice_dashes(choice.name for choice in choices)
    for group in comparable_groups([choice for choice in choices if choice.row.get("perf/first_step_s") is not None]):
        base = next((choice for choice in group if choice.is_baseline), None)
        if base is None or len(group) < 2:
            continue
        paybacks = {choice.id: choice.payback() for choice in group}
        overtaking = sorted(filter(None, paybacks.values()))
        last = 1.6 * max([600, *overtaking[:3]])  # the axis shows the first three crossings, with space behind them
        for choice in [base, *(choice for choice in group if choice is not base)]:
            line = {"color": colours[choice.name], "width": 2, "dash": dashes[choice.name]}
            traces.append(seconds_line(choice, last) | {"line": line})
            payback = paybacks[choice.id]
            if payback and payback <= last:
                traces.append(payback_ring(choice, payback, line["color"]))
    return figure(traces, "steps after the first", "seconds") if traces else None


def seconds_after(choice: Choice, steps: float) -> float:
    return choice.row["perf/first_step_s"] + steps * (choice.row["perf/step_ms"] / 1e3)


def seconds_line(choice: Choice, last: float) -> dict:
    steps = [last * i / 24 for i in range(25)]
    return scatter(
        "lines",
        name=escape(choice.name),
        x=steps,
        y=[seconds_after(choice, step) for step in steps],
        meta=[choice.id, choice_hover(choice)],
        legendgroup=choice.name,
        hovertemplate=f"%{{y:.0f}} s after %{{x:.0f}} steps<br>{HOVER_LINE}",
    )


def payback_ring(choice: Choice, steps: float, colour: str) -> dict:
    seconds = seconds_after(choice, steps)
    text = f"ahead of {choice.comparison.base.title} after {steps:,.0f} steps, {seconds:,.0f} s"
    return scatter(
        "markers",
        name="crossing",
        x=[steps],
        y=[seconds],
        marker={"size": 13, "color": colour, "line": {"color": INK, "width": 2.5}},
        customdata=[[choice.id, hover_text([text], choice.command)]],
        legendgroup=choice.name,
        showlegend=False,
    )
