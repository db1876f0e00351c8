"""The panel of languages: each op in the fastest backend of each language, beside eager PyTorch."""

from common.terminal import override, shell_command
from kernels.names import ALL_OPS, language_of, languages
from lab.report.colours import BACKEND_COLOURS, assign_colours
from lab.report.plot import Figure, Panel, Point, Series, figure, make_origin
from lab.report.source import ReportSource
from lab.report.user_command import benchmark_command

TEXT = (
    "The speed of a kernel, forward + backward, over eager PyTorch's in the same benchmark. A point is the fastest "
    "backend of a language."
)


def language_panels(source: ReportSource) -> list[Panel]:
    """Return the panel; none if no op was measured in several languages."""
    target = "keep=true" if source.from_results else override("out_dir", source.folder / "languages")
    command = f"python -m scripts.bench_kernels op=norm {shell_command(target)}"
    shown = languages_figure(source.benchmarks["kernels"])
    return [Panel("languages", "Languages", TEXT, command, shown)] if shown else []


def languages_figure(rows: list[dict]) -> Figure | None:
    """Return each backend's speed over eager's, from the newest benchmark of an op and shape that has eager, or None.

    `rows` are oldest first. Those of one benchmark have one `started`, which older rows lack.
    """
    groups: dict[tuple, list[dict]] = {}  # op, shape, dtype and `started` -> the rows of this benchmark, oldest first
    for row in rows:
        if "started" in row and row.get("both/ms") and row["impl"] != "auto" and row["op"] in ALL_OPS:
            groups.setdefault((row["op"], row["shape"], row["dtype"], row["started"]), []).append(row)
    benchmarks = {key[:3]: group for key, group in groups.items() if any(row["impl"] == "eager" for row in group)}
    points: dict[str, list[Point]] = {language: [] for language in languages()}
    for op, shape, dtype in sorted(benchmarks, key=lambda key: (key[1], ALL_OPS.index(key[0]))):
        group = benchmarks[op, shape, dtype]
        eager_ms = next(row["both/ms"] for row in group if row["impl"] == "eager")
        settings = {key: group[0][key] for key in ("op", "shape", "dtype")}
        command = benchmark_command("bench_kernels", op, settings)
        fastest = {language_of(row["impl"]): row for row in sorted(group, key=lambda row: -row["both/ms"])}
        for language, row in fastest.items():
            speed = eager_ms / row["both/ms"]
            lines = [f"{language}: {row['impl']}, {row['both/ms']:.3g} ms", f"{op} {shape}, {dtype}"]
            origin = make_origin([*lines, f"{speed:.2f} times the speed of eager"], command)
            points.setdefault(language, []).append(Point(speed, f"{op} {shape}", origin, ring=1))
    colours = assign_colours(points, dict(zip(points, BACKEND_COLOURS, strict=False)))
    series = [Series(name, "markers", each, colours[name], size=11) for name, each in points.items()]
    if len([each for each in series if each.points]) < 2:
        return None
    return figure("times the speed of eager", "", series, row=34, octaves=0.2)
