"""The page of a sweep of generation shows its rows in a real browser."""

import pytest

from lab.report.page import write_report
from tests.lab.report.sample_rows import write_generations
from tests.lab.report.test_page import drawn_traces

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write the report of a sweep of generation, and return what was read from the sweep's folder."""
    folder = write_generations(tmp_path_factory.mktemp("report") / "mine")
    files, source = write_report(folder)
    assert [file.name for file in files] == ["report.html", "report.md"]
    return source


def test_the_page_of_a_sweep_of_generation_shows_its_rows(source, open_page):
    tab = open_page(source.folder)
    traces, measured = drawn_traces(tab), source.measured_generations
    assert traces.keys() == {"batches", "prompts", "decoding"}
    for panel in ("batches", "prompts"):
        speeds = [speed for trace in traces[panel] if trace.get("yaxis") != "y2" for speed in trace["y"]]
        assert sorted(speeds) == sorted(choice.speed for choice in measured)
    milliseconds = sum(sum(trace["x"]) for trace in traces["decoding"])
    assert milliseconds == pytest.approx(sum(choice.row["gen/step_ms"] for choice in measured), rel=0.02)
    assert tab.locator("#generations tr[data-preset]").count() == 12
    assert tab.locator("#choices").count() == 0
    marks = tab.eval_on_selector_all("#batches .legend i", "marks => marks.map(mark => mark.textContent)")
    assert sorted(marks) == ["■"] * 3 + ["●"] * 3
    assert "3 of 508 greedy tokens" in tab.inner_text("#failures")
    button = tab.locator("#generations tr[data-preset] .copy").first
    assert button.get_attribute("data-command") == "python -m scripts.generate kernels.decode=int8 batch=1"


@pytest.mark.parametrize(("width", "options"), [(390, {"is_mobile": True, "has_touch": True}), (1280, {})])
def test_nothing_is_wider_than_the_screen(source, open_page, width, options):
    tab = open_page(source.folder, width, **options)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    elements = "[...document.querySelectorAll('.plot, .values, .table td')]"  # .values scrolls its cells
    right = f"Math.max(...{elements}.map(e => e.getBoundingClientRect().right))"
    assert tab.evaluate(right) <= width
