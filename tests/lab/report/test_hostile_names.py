"""Names, settings and reasons in rows from somebody else: figures, tables and the page show them as text."""

import json
import re
import warnings

import pytest
from matplotlib.figure import Figure

from lab.judge.verdict import page, speed_figure
from lab.report import bench_panels, loss_curves, panels
from lab.report.colours import choice_colours
from lab.report.loss_curves import Curve
from lab.report.page import write_report
from lab.report.tables import markdown_table
from lab.rows import read_jsonl
from tests.lab.judge.test_judge import verdict_of
from tests.lab.report.sample_rows import (
    make_attention_row,
    make_context_row,
    make_generation_row,
    make_kernel_row,
    make_row,
    write_row,
)

MARKUP = "<img src=x onerror=document.title=1>"
NAMES = [r"$\frac$", "$", "$a$ and $b$", "_hidden", "a_b^c", "\\", "%s {x} {0} %{y}", "<b>&amp;</b>", MARKUP]
NAMES += ["x" * 5000, "two words " * 900, "a\nb\x1b[2J", "|`|[x](javascript:1)", "</script><!-- end -->"]
NAMES += ["\u202e\u0000", "漢字", " ", ""]
# Words in the sample rows that a hostile row may replace: backends, a device, a family of kernels, a shape, a version
WORDS = ["triton", "flash", "NVIDIA H200", "gemm", "124m", "2.11.0", "f3adfe01", "cold"]


def replaced(value, name):
    """A row with the name in the place of each of WORDS, in keys and values."""
    if isinstance(value, dict):
        is_env = "device" in value  # its key `triton` is no backend
        return {key if is_env else replaced(key, name): replaced(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, name) for item in value]
    return re.sub("|".join(map(re.escape, WORDS)), lambda _: name, value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a sweep with a row of each kind for each name."""
    folder = tmp_path_factory.mktemp("report") / "sweep"
    lines = {"kernels": [], "attention": [], "context": [], "judge": []}
    for number, name in enumerate(NAMES):
        for kind, row in enumerate((make_row("triton", "flash"), make_generation_row("triton", "triton", "flash"))):
            write_row(folder / f"{number}-{kind}", replaced(row, name))
        write_row(folder / f"{number}-failed", make_row() | {"status": f"failed: {name}", "name": name})
        lines["kernels"].append(make_kernel_row("gemm", "triton", "124m", 0.4, 3.4, 3.8))
        lines["attention"].append(make_attention_row("flash", 1024))
        lines["context"].append(make_context_row("triton", "flash", 2**20, 2**21, pos="rope"))
        lines["judge"].append(verdict_of(90) | {"command": name})
        for rows in lines.values():
            rows[-1] = replaced(rows[-1], name)
    for kind, rows in lines.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def report(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the font lacks
        files, source = write_report(folder)
    assert [file.name for file in files] == ["report.html", "report.md", "speed.png", "roofline.png", "attention.png"]
    return source


def test_the_page_and_the_markdown_have_no_markup_of_a_row(folder, report):
    """All rows are shown. Markdown has no link, no formula and no line break of a row."""
    assert report.left_out == []
    assert sum(len(choice.rows) for choice in report.all_choices) == 3 * len(NAMES)
    html = (folder / "report.html").read_text()
    packed = re.findall(r'<script type="application/gzip" id="\w+">(.*?)</script>', html, re.DOTALL)
    assert len(packed) == 2
    assert all(re.fullmatch(r"[\w+/=]+", text) for text in packed)
    shown = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert "<img" not in shown
    assert "<b>&" not in shown
    assert "<!-- " not in shown
    markdown = (folder / "report.md").read_text()
    assert "<" not in markdown
    assert not re.search(r"(?<!\\)\$", markdown)
    assert {match[1] for match in re.finditer(r"(?<!\\)\[(.*?)\]", markdown)} == {
        *("report.html", "speed", "roofline", "attention")
    }
    assert max(map(len, markdown.splitlines())) < 20_000


@pytest.mark.parametrize("name", ["draw_attention", "draw_roofline", "draw_curves", "draw_speeds", "speed_figure"])
@pytest.mark.filterwarnings("ignore:.*Glyph")
def test_a_figure_of_matplotlib_shows_a_name_as_text(report, folder, name, tmp_path, monkeypatch):
    """Two $ would begin a formula, and `_` would hide the label. A long name is cut."""
    choices, texts, savefig = report.measured_choices, [], Figure.savefig
    verdicts = [row for _, row in read_jsonl(folder / "judge.jsonl")[0]]
    drawn = {
        "draw_attention": lambda path: bench_panels.draw_attention(report.benchmarks["attention"], path),
        "draw_roofline": lambda path: bench_panels.draw_roofline(report.benchmarks["kernels"], path),
        "draw_curves": lambda path: loss_curves.draw_curves("h200", path),
        "draw_speeds": lambda path: panels.draw_speeds(choices, choice_colours(c.name for c in choices), path),
        "speed_figure": lambda path: [speed_figure(row, path) for row in verdicts][-1:],
    }
    names = {
        name for module in (bench_panels, loss_curves, panels) for name in vars(module) if name.startswith("draw_")
    }
    assert names - {"draw_figures"} == drawn.keys() - {"speed_figure"}  # a new figure needs a case
    runs = [Curve(make_row() | {"kernels": {"peer": each}}, each, {1: 5.0, 2: 4.0}, {}) for each in NAMES]
    monkeypatch.setattr(loss_curves, "curves", lambda device: runs)

    def save(figure, *args, **options):
        savefig(figure, *args, **options)
        shown = (text.get_text().replace(r"\$", "$") for text in figure.findobj(lambda a: hasattr(a, "get_text")))
        texts.extend(" ".join(text.split()) for text in shown)  # a label has several lines

    monkeypatch.setattr(Figure, "savefig", save)
    assert drawn[name](tmp_path / "x.png") == [tmp_path / "x.png"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    for each in NAMES:
        beginning = " ".join(each.split())[:20]
        if beginning.isprintable():
            assert any(beginning in text for text in texts), each
    assert max(map(len, texts)) < 300


def test_a_page_of_a_verdict_and_a_table_of_hostile_texts(folder):
    assert all(page(row) for _, row in read_jsonl(folder / "judge.jsonl")[0])
    table = markdown_table(["a", "b"], [[name, name] for name in NAMES]).splitlines()
    assert len(table) == 2 + len(NAMES)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in table)


@pytest.mark.exhaustive
def test_no_markup_of_a_row_runs_in_a_browser(open_page, report, folder):
    """Neither in a table, nor in a legend, whose names are HTML, nor in the text of a point."""
    tab = open_page(folder)
    assert tab.title() == "hotswap: what was measured in sweep"
    assert tab.locator("img").count() == 0
    assert MARKUP in tab.inner_text("#families .legend")
    commands = tab.evaluate("[...document.querySelectorAll('.copy')].map((button) => button.dataset.command)")
    assert commands
    assert all(command.startswith(("python train.py", "python -m scripts.")) for command in commands)
