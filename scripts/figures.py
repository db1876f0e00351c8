"""PNGs from rows, and which rows are shown."""

from pathlib import Path


def newest_kernels(rows: list[dict]) -> dict[tuple[str, ...], dict]:
    """(op, dtype, shape, backend) -> its newest row."""
    return {(row["op"], row["dtype"], row["shape"], row["impl"]): row for row in rows}


def newest_context(rows: list[dict]) -> dict[tuple[int, str], dict]:
    """(T, backend) -> row: the newest ones, of the newest row's shape, shortest T first."""
    keys = ("batch", "heads", "kv_heads", "head_dim", "window", "documents", "dtype")
    shape = [[row[key] for key in keys] for row in rows]
    found = {(row["T"], row["impl"]): row for row, alike in zip(rows, shape, strict=True) if alike == shape[-1]}
    return dict(sorted(found.items()))


def context_plot(rows: list[dict], path: Path) -> Path:
    """Draws time and memory of attention against T, both ways: the quadratic and the linear."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = newest_context(rows)
    units = {"both/ms": "ms", "both/peak_gib": "peak GiB"}
    units = {key: unit for key, unit in units.items() if any(row.get(key) for row in found.values())}
    figure, [axes] = pyplot.subplots(1, len(units), figsize=(5.5 * len(units), 4.5), squeeze=False)
    for panel, (key, label) in zip(axes, units.items(), strict=True):
        for name in dict.fromkeys(impl for _, impl in found):
            points = [(T, row[key]) for (T, impl), row in found.items() if impl == name and row.get(key)]
            panel.plot([T for T, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
        panel.set(xscale="log", yscale="log", xlabel="T", ylabel=f"{label}, forward + backward")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path


def roofline(rows: list[dict], path: Path) -> Path:
    """Draws the newest row of each kernel under the roof of its machine: what a FLOP a byte allows (Williams et al.
    2009)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bandwidth, peak = rows[-1]["ceiling/tb_per_s"], rows[-1]["ceiling/tflops"]
    rows = [*newest_kernels(rows).values()]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    intensities = [row["both/tflops"] / row["both/tb_per_s"] for row in rows]
    ends = min([*intensities, peak / bandwidth]) / 4, max([*intensities, peak / bandwidth]) * 4
    roof = sorted({*ends, peak / bandwidth})
    axes.plot(roof, [min(peak, bandwidth * x) for x in roof], color="black", linewidth=1)
    for i, impl in enumerate(sorted({row["impl"] for row in rows})):
        mine = [(x, row) for x, row in zip(intensities, rows, strict=True) if row["impl"] == impl]
        x, y = [x for x, _ in mine], [row["both/tflops"] for _, row in mine]
        axes.scatter(x, y, label=impl, s=20, marker="o^s"[i // 10 % 3])  # there are 10 colours
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte, every tensor moved once", ylabel="TFLOP/s, both ways")
    axes.set_title(f"{bandwidth:.3g} TB/s of a copy, {peak:.3g} TFLOP/s of a matmul", fontsize=10)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path


def curves_plot(runs: dict[str, dict[int, float]], path: Path) -> Path:
    """Draws losses, run -> step -> loss, and their difference from the first run's below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (first, reference), *_ = runs.items()
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1])
    for name, losses in runs.items():
        steps = sorted(losses)
        above.plot(steps, [losses[s] for s in steps], label=name, linewidth=1)
        if name != first:
            below.plot(steps, [losses[s] - reference[s] for s in steps], label=f"{name} - {first}", linewidth=1)
    above.set_ylabel("training loss")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    above.legend()
    below.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path
