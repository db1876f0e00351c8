"""The page opens with what to take, and can be read: contrast, charts as tables, its size."""

import base64
import gzip
import html
import json
import re
from pathlib import Path

import pytest

from lab.judge.verdict import trained_settings
from lab.report.colours import BACKEND_COLOURS, GREY, PART_COLOURS, contrast, text_on
from lab.report.page import links, render_page, write_report
from lab.report.panels import axis_label
from lab.report.plot import Figure, Point, Series, line, make_origin, markup, value_table
from lab.report.recommendations import recommendations
from lab.report.source import read_source
from tests.lab.report.sample_rows import write_sweep
from tests.lab.report.test_page import drawn_traces

ROOT = Path(__file__).resolve().parents[3]
LEAST = 4.5  # WCAG 2.2, level AA, for text of normal size
# Returns [text, colour, background] of each text that is shown. The background of a bar's text is the bar. The marks of
# a legend are no text, and are hidden from readers of the page
SHOWN_TEXTS = """() => [...document.querySelectorAll("body *")].flatMap((e) => {
    const texts = [...e.childNodes].filter((node) => node.nodeType === 3 && node.textContent.trim());
    if (!texts.length || e.ariaHidden) return [];
    if (!e.checkVisibility({ visibilityProperty: true, opacityProperty: true })) return [];
    const text = texts[0].textContent.trim(), svg = e.closest("svg");
    const bar = e.closest("text")?.classList.contains("bartext-inside") && e.closest(".point").querySelector("path");
    const colour = getComputedStyle(e)[svg ? "fill" : "color"];
    if (bar) return [[text, colour, getComputedStyle(bar).fill]];
    let behind = svg ? svg.parentElement : e;
    while (/, 0\\)$/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
    return [[text, colour, getComputedStyle(behind).backgroundColor]];
})"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_sweep(tmp_path_factory.mktemp("report") / "mine")
    write_report(folder)
    return folder


def hexadecimal(colour):
    """Return "#rrggbb" for "rgb(1, 2, 3)"; an opaque colour only."""
    numbers = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour)
    assert numbers, colour
    return "#" + "".join(f"{int(number):02x}" for number in numbers.groups())


def test_the_contrast_of_known_pairs():
    """WCAG's examples: 21 for black on white; #767676 is the lightest grey that is enough on white."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") < LEAST < contrast("#767676", "#ffffff")
    assert contrast("#ffffff", "#009E73") == pytest.approx(3.4, abs=0.05)  # Plotly's own choice of a label's colour
    for fill in {*BACKEND_COLOURS, *PART_COLOURS, GREY}:
        assert contrast(text_on(fill), fill) >= LEAST


@pytest.mark.exhaustive
def test_every_text_has_enough_contrast(folder, open_page):
    tab = open_page(folder)
    tab.evaluate("document.querySelectorAll('details').forEach((details) => (details.open = true))")
    tab.locator("#speed .barlayer .point path").first.hover(force=True)
    tab.wait_for_selector("#hover.on")
    texts = tab.evaluate(SHOWN_TEXTS)
    low = [each for each in texts if contrast(hexadecimal(each[1]), hexadecimal(each[2])) < LEAST]
    assert low == []
    backgrounds = {background for _, _, background in texts}
    assert len(backgrounds) > 5  # the page, the cards, and bars of several colours
    assert {"Take this", "As a table", "Precision"} <= {text for text, _, _ in texts}


def test_every_chart_is_also_a_table_without_javascript(folder):
    text = (folder / "report.html").read_text()
    charts = re.findall(
        r'<section class="card" id="(\w+)">.*?<div class="plot".*?<table>(.*?)</table>', text, re.DOTALL
    )
    assert len(charts) >= 8
    for panel, table in charts:
        assert table.count("<tr") > 2, panel
        assert table.count("<td>") > 4, panel
    speeds = [choice.speed for choice in read_source(folder).measured_choices]
    assert all(f"<td>{speed:,.0f}</td>" in dict(charts)["speed"] for speed in speeds)


def test_a_figure_of_categories_has_a_line_of_its_table_for_each():
    """Two series of one name are distinguished by their side; a series without an origin is left out."""
    series = []
    for name, side, values in (("weights", "left", [1, 2]), ("weights", "right", [3]), ("", "left", [640219.4])):
        points = [Point(x, y, make_origin([y], "", "tiny", "bf16")) for x, y in zip(values, "ab", strict=False)]
        series.append(Series(name, "bars", points, side=side))
    series.append(Series("", "bars", [Point(9, "a")]))
    columns, lines = value_table(Figure("GiB", "", series))
    assert columns == ["", "weights, left", "weights, right", "GiB, left"]
    assert [line.cells for line in lines] == [["a", "1", "3", "640,219"], ["b", "2", "", ""]]
    assert {(line.preset, line.precision) for line in lines} == {("tiny", "bf16")}


def test_the_lines_of_a_table_have_the_order_of_the_categories():
    """A stacked figure whose first series lacks a category had that category last."""
    series = []
    for name, values in (("matmul", {"a": 1, "c": 3}), ("norm", {"a": 1, "b": 2, "c": 3})):
        points = [Point(x, y, make_origin([y], "", "tiny", "bf16")) for y, x in values.items()]
        series.append(Series(name, "bars", points))
    _, lines = value_table(Figure("ms", "", series, categories=["a", "b", "c"]))
    assert [line.cells[0] for line in lines] == ["a", "b", "c"]


def test_a_curve_has_its_ends_in_the_table():
    curve = line("fast", {1: 5.0, 2: 4.5, 3: 4.0}, origin=make_origin(["fast"], ""))
    columns, lines = value_table(Figure("step", "loss", [curve], below=[curve], y_below="difference"))
    assert columns == ["", "step", "loss"]
    cells = [["fast", "1", "5"], ["fast", "3", "4"], ["fast: difference", "1", "5"], ["fast: difference", "3", "4"]]
    assert [each.cells for each in lines] == cells


@pytest.mark.exhaustive
def test_every_chart_is_also_a_table_of_what_the_filters_show(folder, open_page):
    tab = open_page(folder, 1000)
    for precision in ("", "bf16"):
        tab.select_option("#precision", precision)
        drawn = {panel: traces for panel, traces in drawn_traces(tab).items() if traces}
        assert len(drawn) >= 8
        for panel, traces in drawn.items():
            label = tab.locator(f"#{panel} .plot").get_attribute("aria-label")
            assert label.endswith("below also as a table")
            lines = tab.locator(f"#{panel} .values tr:not(:first-child)").evaluate_all(
                """lines => lines.filter((line) => !line.hidden)
                    .map((line) => [...line.children].slice(1).map((cell) => cell.textContent).filter(Boolean))"""
            )
            shown = [trace for trace in traces if trace.get("customdata") or trace.get("meta")]
            points = sum(len(trace["customdata"]) if trace.get("customdata") else 2 for trace in shown)
            numbers = 1 if isinstance(shown[0]["y"][0], str) else 2  # of a point
            assert sum(map(len, lines)) == numbers * points, panel
            if panel == "speed":
                speeds = [float(line[0].replace(",", "")) for line in lines]
                assert speeds == pytest.approx(traces[0]["x"], rel=1e-3)


@pytest.mark.exhaustive
def test_the_page_opens_with_what_to_take_and_copies_its_command(folder, open_page):
    tab, found = open_page(folder, 1100), recommendations(read_source(folder).measured)
    top = {id: tab.locator(f"#{id}").bounding_box()["y"] for id in ("take", "speed", "notes")}
    assert top["take"] < min(top["speed"], top["notes"])
    assert tab.locator("#take h3").all_inner_texts() == [take.title for take in found]
    pick = found[0].picks[0]
    assert tab.locator("#take code").first.inner_text() == pick.command
    tab.locator("#take .pick .copy").first.click()
    toast_has_command = "command => document.querySelector('#toast').textContent.includes(command)"
    tab.wait_for_function(toast_has_command, arg=pick.command)
    ladder = tab.locator("#take section").first.locator("tr")
    assert ladder.count() == 1 + len(found[0].ladder)
    tab.select_option("#preset", "gpt2_350m")
    assert tab.locator("#take h3:visible").all_inner_texts() == [
        take.title for take in found if take.preset == "gpt2_350m"
    ]


@pytest.fixture(scope="module")
def largest_page():
    """The page of results/h200, which has most rows, as written outside of a workflow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GITHUB_REPOSITORY", raising=False)
        return render_page(read_source(ROOT / "results/h200"))


def unpack(page: str, id: str) -> str:
    """Return the text that a page holds as gzip in base64."""
    packed = re.search(rf'<script type="application/gzip" id="{id}">(.*?)</script>', page, re.DOTALL)
    return gzip.decompress(base64.b64decode(packed[1])).decode()


@pytest.mark.exhaustive
def test_the_page_of_the_largest_folder_is_under_3_mb(largest_page):
    """Plotly alone had 4.8 MB in it."""
    assert len(largest_page.encode()) < 3e6


@pytest.mark.exhaustive
def test_no_copied_command_names_a_file_that_a_clone_lacks(largest_page):
    """Neither that of a button, nor that of a point. Most rows trained on a text that git does not have."""
    commands = set(map(html.unescape, re.findall(r'data-command="(.*?)"', largest_page)))
    for figure in json.loads(unpack(largest_page, "data")).values():
        for trace in figure["data"]:
            commands |= {origin[1] for origin in [*trace.get("customdata", []), trace.get("meta", ["", ""])]}
    assert len(commands) > 200
    assert [command for command in commands if re.search(r"sotu|data\.path|out/|init_from", command)] == []


def test_a_page_without_a_choice_has_no_section_of_what_to_take():
    """results/h200x4 has one choice of each work."""
    page = render_page(read_source(ROOT / "results/h200x4"))
    assert "Take this" not in page
    assert 'id="choices"' in page


def test_each_card_says_where_and_when_its_session_was_measured(largest_page, folder):
    """A row of a sweep without a date has its machine and commit."""
    found = recommendations(read_source(ROOT / "results/h200").measured)
    cards = re.findall(r"<h3>([^<]*)</h3>\s*<p>Measured on (.*?)\.</p>", largest_page)
    assert [title for title, _ in cards] == [html.escape(take.title) for take in found]
    for (_, text), take in zip(cards, found, strict=True):
        rows = [choice.row for choice in take.ladder]
        assert text.startswith("one H200, commit ")
        assert {row["env"]["git_commit"][:7] for row in rows} == {text.split()[3].strip("+,")}
        assert text[-10:] == max(row["started"] for row in rows)[:10]
    assert "<p>Measured on one H200, commit f3adfe0.</p>" in (folder / "report.html").read_text()


def test_a_page_of_results_has_a_title_and_links(largest_page, monkeypatch, folder):
    """results/README.md is beside the page's folder in results/ and in out/pages. A workflow knows the repository."""
    title = "hotswap: what was measured on h200"
    assert f"<title>{title}</title>" in largest_page
    assert f"<h1>{title} (NVIDIA H200)</h1>" in largest_page
    assert re.findall(r'<a href="(.*?)"', largest_page) == ["../README.md"]
    assert (ROOT / "results/h200" / "../README.md").exists()
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    address = "https://github.com/owner/name"
    assert list(links().values()) == [f"{address}/blob/HEAD/results/README.md", address]
    assert "<a href" not in (folder / "report.html").read_text()  # a sweep's folder may be anywhere


def test_a_filter_acts_on_every_line_with_a_model(largest_page):
    """A verdict names the size of its model, and a search the shape: all of results/h200 are of GPT-2 124M."""
    tables = dict(re.findall(r'<section class="card table" id="(\w+)">(.*?)</section>', largest_page, re.DOTALL))
    for id in ("verdicts", "searches"):
        lines = re.findall(r'<tr data-preset="(.*?)" data-precision="(.*?)">', tables[id])
        assert len(lines) > 1
        assert set(lines) == {("gpt2_124m", "bf16")}
    assert trained_settings({"baseline": "355M, norm=rmsnorm, amp, 64 x 1024 tokens, triton"}) == ("gpt2_350m", "amp")
    assert trained_settings({"baseline": "tiny, pos=rope, bf16, 4 x 64 tokens, eager"}) == ("tiny", "bf16")
    assert trained_settings({"verdict": "wrong"}) == ("", "")


@pytest.mark.exhaustive
def test_a_long_table_is_closed_and_says_what_is_in_it(open_page, largest_page, tmp_path):
    """results/h200 was 37 screens high. A filter acts on a closed table, and on its count."""
    (tmp_path / "report.html").write_text(largest_page)
    tab = open_page(tmp_path)
    source = read_source(ROOT / "results/h200")
    for id, title, count in (
        ("choices", "Every choice of training", len(source.measured_choices)),
        ("generations", "Every choice of generation", len(source.measured_generations)),
    ):
        assert tab.locator(f"#{id} details").get_attribute("open") is None
        assert tab.inner_text(f"#{id}") == f"{title} {count} rows"
    few = len([choice for choice in source.measured_choices if choice.preset == "gpt2_1558m"])
    tab.select_option("#preset", "gpt2_1558m")
    assert tab.inner_text("#choices .count") == f"{few} of {len(source.measured_choices)} rows"
    tab.locator("#choices summary").click()
    assert tab.locator("#choices tr[data-preset]:visible").count() == few > 0
    assert not tab.locator("#speed.empty").count()


def profile(choice):
    return (choice.row.get("receipt") or {}).get("families")


@pytest.mark.exhaustive
def test_a_long_figure_shows_its_first_bars_until_a_click_shows_all(open_page, largest_page, tmp_path):
    """The bars took 9,000 of the page's 17,000 pixels. If a filter leaves 12 bars or fewer, there is no button."""
    (tmp_path / "report.html").write_text(largest_page)
    tab = open_page(tmp_path)
    source = read_source(ROOT / "results/h200")
    height = tab.evaluate("document.documentElement.scrollHeight")
    trained, generated = source.measured_choices, source.measured_generations
    profiled = [[choice for choice in each if profile(choice)] for each in (trained, generated)]
    with_parts = [choice for choice in trained if choice.row.get("memory")]
    figures = {"speed": trained, "memory": with_parts, "families": profiled[0], "decoding": profiled[1]}
    for panel, choices in figures.items():
        button = tab.locator(f"#{panel} .all")
        drawn = f"new Set(document.querySelector('#{panel} .plot').data.flatMap(({{ y }}) => y)).size"
        assert tab.evaluate(drawn) == 12
        first = [*dict.fromkeys(markup(axis_label(choice)) for choice in choices)][:12]
        assert tab.evaluate(f"document.querySelector('#{panel} .plot').layout.yaxis.categoryarray") == first
        count = int(button.inner_text().removeprefix("Show all "))
        button.click()
        assert tab.evaluate(drawn) == count > 12
        assert button.inner_text() == "Show the first 12"
    assert tab.evaluate("document.documentElement.scrollHeight") > height + 4000
    tab.locator("#speed .all").click()
    speeds = tab.evaluate("document.querySelector('#speed .plot').data[0].x")
    assert speeds == [choice.speed for choice in source.measured_choices[:12]]
    tab.select_option("#preset", "tiny")
    assert not tab.locator("#speed .all").is_visible()


@pytest.mark.exhaustive
def test_a_short_table_is_open(folder, open_page):
    tab = open_page(folder)
    assert tab.locator("#choices tr[data-preset]:visible").count() == 12
    assert tab.inner_text("#choices .count") == "12 rows"
