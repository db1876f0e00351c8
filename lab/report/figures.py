"""Draw PNGs from rows: the speed of choices, attention over T, kernels under the roofline, loss curves."""

import io
from pathlib import Path

from files import write_atomically
from lab.report.choices import Choice
from lab.report.colours import CHOICE_COLOURS, GREY
from lab.report.describe import newest_attention, newest_kernels
from lab.report.loss_curves import Curve, with_reference
from terminal import printable

ATTENTION_UNITS = {"both/ms": "ms", "both/peak_gib": "peak GiB"}


def plain(text: str, width: int = 80) -> str:
    """Return a text of a row for matplotlib, which would read a formula between two $, and hide a label `_name`."""
    text = " ".join(printable(text).split()) or "?"
    text = text if len(text) <= width else f"{text[: width - 3]}..."
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def subplots(*args, **settings) -> tuple:
    """Return a figure and its axes, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*args, **settings)


def save(figure, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    write_atomically(path, content.getvalue())
    return path


def attention_plot(rows: list[dict], path: Path) -> Path:
    """Draw time and memory of attention over T, forward + backward."""
    newest = newest_attention(rows)
    units = {key: unit for key, unit in ATTENTION_UNITS.items() if any(row.get(key) for row in newest.values())}
    figure, [axes] = subplots(1, len(units), figsize=(5.5 * len(units), 4.5), squeeze=False)
    for panel, (key, unit) in zip(axes, units.items(), strict=True):
        for name in dict.fromkeys(impl for _, impl in newest):
            points = [(T, row[key]) for (T, impl), row in newest.items() if impl == name and row.get(key)]
            panel.plot([T for T, _ in points], [y for _, y in points], marker="o", markersize=3, label=plain(name))
        panel.set(xscale="log", yscale="log", xlabel="T", ylabel=f"{unit}, forward + backward")
    axes[0].legend(fontsize=8)
    return save(figure, path)


def roofline(rows: list[dict], path: Path) -> Path:
    """Draw the newest row of each kernel under its machine's roofline (Williams et al. 2009).

    The roofline is the highest FLOP/s that the bandwidth and the matmul allow, over FLOP/byte.
    """
    bandwidth, peak = rows[-1]["ceiling/tb_per_s"], rows[-1]["ceiling/tflops"]
    newest = list(newest_kernels(rows).values())
    figure, axes = subplots(figsize=(8, 5))
    intensities = [row["both/tflops"] / row["both/tb_per_s"] for row in newest]
    ridge = peak / bandwidth
    roof = sorted({min([*intensities, ridge]) / 4, ridge, max([*intensities, ridge]) * 4})
    axes.plot(roof, [min(peak, bandwidth * x) for x in roof], color="black", linewidth=1)
    for i, impl in enumerate(sorted({row["impl"] for row in newest})):
        points = [(x, row["both/tflops"]) for x, row in zip(intensities, newest, strict=True) if row["impl"] == impl]
        marker = "o^s"[i // 10 % 3]  # matplotlib has 10 colours
        axes.scatter([x for x, _ in points], [y for _, y in points], label=plain(impl), s=20, marker=marker)
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP/byte, each tensor moved once", ylabel="TFLOP/s, forward + backward"
    )
    axes.set_title(f"the roofline: a copy at {bandwidth:.3g} TB/s, a matmul at {peak:.3g} TFLOP/s", fontsize=10)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, path)


def curves_plot(runs: list[Curve], path: Path) -> Path:
    """Draw the losses of each run, and below them the differences from the first run of the same seed.

    There is at least one run. A choice has a colour, and a seed has a style of line.
    """
    figure, (above, below) = subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 2])
    choices, seeds = (list(dict.fromkeys(part)) for part in zip(*((run.choice, run.seed) for run in runs), strict=True))
    for run, first in with_reference(runs):
        steps = sorted(run.losses.keys() & first.losses.keys())
        style = {"color": CHOICE_COLOURS[choices.index(run.choice) % len(CHOICE_COLOURS)], "linewidth": 1}
        style |= {"linestyle": ["-", "--", ":", "-."][seeds.index(run.seed) % 4], "label": plain(run.name)}
        above.plot(steps, [run.losses[step] for step in steps], **style)
        if run is not first:
            below.plot(steps, [run.losses[step] - first.losses[step] for step in steps], **style)
    above.set_ylabel("validation loss" if runs[0].losses is runs[0].validation else "training loss")
    below.set_ylabel("above the first of its seed")
    below.axhline(0, color=GREY, linewidth=0.5)
    below.set_xlabel("step")
    above.legend(fontsize=8)
    return save(figure, path)


def speed_plot(choices: list[Choice], colours: dict[str, str], path: Path) -> Path:
    """Draw tokens/s and peak memory of each choice, the first choice on top."""
    choices = choices[::-1]  # matplotlib draws upwards
    figure, (left, right) = subplots(1, 2, figsize=(10, 1 + 0.4 * len(choices)), sharey=True, width_ratios=[3, 1])
    (titles, shared), fills = short_titles(choices), [colours[choice.name] for choice in choices]
    titles = list(map(plain, titles))
    speeds, memory = [choice.speed for choice in choices], [choice.memory or 0 for choice in choices]
    below = [choice.speed - choice.spread[0] for choice in choices]
    above = [choice.spread[1] - choice.speed for choice in choices]
    left.barh(titles, speeds, xerr=[below, above], color=fills, error_kw={"linewidth": 1, "capsize": 2})
    left.set_title(plain(shared, 160) if shared else "", loc="left", fontsize=10)
    right.barh(titles, memory, color=fills)
    left.set_xlabel("tokens/s")
    left.xaxis.set_major_formatter("{x:,.0f}")
    right.set_xlabel("GiB at the peak")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_ylim(-0.6, len(choices) - 0.4)  # by default matplotlib leaves 5% of the height empty at each end
    return save(figure, path)


def short_titles(choices: list[Choice]) -> tuple[list[str], str]:
    """Return a title for each choice without the parts that all of them share, and these parts."""
    if len(choices) == 1:
        return [choices[0].title], ""
    titles = [
        [f"kernels={kernels}", f"attn={attention}", *choice.qualifier.split(" · ")]
        for choice in choices
        for kernels, attention in [name_parts(choice)]
    ]
    shared = [part for part in titles[0] if part and all(part in title for title in titles)]
    short = [" · ".join(part.split("=", 1)[-1] for part in title if part and part not in shared) for title in titles]
    return short, ", ".join(shared)


def name_parts(choice: Choice) -> tuple[str, str]:
    """Return (kernels, attention)."""
    kernels, _, attention = choice.name.partition(" · ")
    return kernels, attention
