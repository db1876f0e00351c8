"""The page of a report shows its rows in a real browser, and the files beside it are complete."""

import json
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lab.report.page import write_report
from lab.report.panels import axis_label
from lab.sweep import compare
from scripts import report
from tests.lab.report.sample_rows import SPEEDS, make_row, write_row, write_sweep

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write the report of a sweep, and return what was read from the sweep's folder."""
    folder = write_sweep(tmp_path_factory.mktemp("report") / "mine")
    files, source = write_report(folder)
    assert [file.name for file in files] == ["report.html", "report.md", "speed.png", "roofline.png", "attention.png"]
    assert all(file.stat().st_size for file in files)
    assert files[0].stat().st_size < 3e6
    return source


def number_of_two_runs(source):
    """Return the index in measured_choices of a choice with two runs."""
    return [choice.title for choice in source.measured_choices].index("triton + compile · flash (gpt2_124m · amp)")


def drawn_traces(tab):
    """Return the id of each panel -> its traces in Plotly."""
    return tab.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [
            plot.parentElement.id,
            (plot.parentElement.classList.contains("empty") ? [] : plot.data).map(
                ({ name, x, y, yaxis, text, customdata, meta, marker }) => (
                    { name, x, y, yaxis, text, customdata, meta, marker })),
        ]))"""
    )


def test_every_panel_shows_its_rows(source, open_page):
    traces = drawn_traces(open_page(source.folder))
    measured, rows = source.measured_choices, [choice.row for choice in source.measured_choices]
    assert len(measured) == 12
    assert traces["speed"][0]["x"] == [choice.speed for choice in measured]
    two_runs = measured[number_of_two_runs(source)]
    assert two_runs.speed == statistics.fmean(row["perf/tokens_per_sec"] for row in two_runs.rows)
    assert sorted(two_runs.spread) == sorted(row["perf/tokens_per_sec"] for row in two_runs.rows)

    peaks = [row["memory"][side]["peak"] for row in rows for side in ("predicted", "measured")]
    assert sum(sum(trace["x"]) for trace in traces["memory"]) == pytest.approx(sum(peaks))
    places = {place for trace in traces["tradeoff"] for place in zip(trace["x"], trace["y"], strict=True)}
    assert places == {(choice.memory, choice.speed) for choice in measured}
    ms = sum(sum(row["receipt"]["families"].values()) for row in rows)
    assert sum(sum(trace["x"]) for trace in traces["families"] if trace["name"] != "idle") == pytest.approx(ms)
    losses = [trace["y"] for trace in traces["parity"]]
    assert all(row["parity"]["losses"] in losses and row["parity"]["reference"] in losses for row in rows)
    parity = rows[0]["parity"]
    assert [a - b for a, b in zip(parity["losses"], parity["reference"], strict=True)] in losses

    crossings = [trace for trace in traces["payback"] if len(trace["x"]) == 1]
    pairs = [(choice.row, choice.base.row) for choice in measured if choice.base is not choice]
    assert sorted(trace["x"][0] for trace in crossings) == sorted(compare.payback_steps(*pair) for pair in pairs)
    lengths = {trace["name"]: trace["x"] for trace in traces["context"]}
    assert lengths["training"] == [2_129_920, 196_608]
    assert lengths["generation"] == [6_291_456, 1_048_576]
    assert sorted(y for trace in traces["roofline"][1:] for y in trace["y"]) == [1.6, 3.4, 488, 590]
    assert {trace["name"]: len(trace["x"]) for trace in traces["attention"]} == {"eager": 3, "flash": 4}


def test_a_choice_has_the_same_colour_in_every_panel(source, open_page):
    traces = drawn_traces(open_page(source.folder))
    bars = traces["speed"][0]
    texts = [origin[0] for origin in bars["customdata"]]  # of the hover, which begins with the choice's title
    colours = dict(zip(texts, bars["marker"]["color"], strict=True))
    for trace in traces["tradeoff"]:
        assert {colours[origin[0]] for origin in trace["customdata"]} == {trace["marker"]["color"]}
    assert len(set(colours.values())) == len({kernels for kernels, _ in SPEEDS})


def test_filters_act_on_every_panel(source, open_page):
    tab = open_page(source.folder)
    tab.select_option("#precision", "bf16")
    tab.select_option("#preset", "gpt2_350m")
    traces, expected = (
        drawn_traces(tab),
        {choice.command for choice in source.measured_choices if choice.preset == "gpt2_350m"},
    )
    assert len(expected) == 2
    for panel in ("speed", "memory", "tradeoff", "families", "parity", "payback"):
        origins = [origin for trace in traces[panel] for origin in trace["customdata"] or [trace["meta"]]]
        assert {command for _, command, _, _ in origins} - {""} == expected, panel
        assert {(preset, precision) for _, _, preset, precision in origins} == {("gpt2_350m", "bf16")}, panel
    assert traces["context"] == []
    assert tab.locator("#context.empty").count() == 1
    assert tab.locator("#choices tr[data-preset]:visible").count() == 2
    tab.select_option("#preset", "")
    tab.select_option("#precision", "")
    assert tab.locator("#choices tr[data-preset]:visible").count() == 12
    assert len(drawn_traces(tab)["speed"][0]["x"]) == 12


def test_a_hover_shows_all_figures_and_a_click_copies_the_command(source, open_page):
    tab = open_page(source.folder)
    number = number_of_two_runs(source)
    tab.locator("#speed .barlayer .point path").nth(number).scroll_into_view_if_needed()
    bar = tab.locator("#speed .barlayer .point path").nth(number).bounding_box()
    place = bar["x"] + 0.8 * bar["width"], bar["y"] + bar["height"] / 2
    tab.mouse.move(*place)
    tab.wait_for_selector("#hover.on")
    text = tab.inner_text("#hover")
    two_runs, fourth = source.measured_choices[number], source.measured_choices[3]
    for part in (
        f"tokens/s {two_runs.speed:,.0f}",
        "2 runs",
        "peak GiB 19.4",
        "parity holds",
        "caches cold",
        "kernels=triton kernels.compile=true",
    ):
        assert part.replace(" ", "") in text.replace(" ", "")
    tab.mouse.click(*place)
    tab.wait_for_selector("#toast.on")
    assert two_runs.command in tab.inner_text("#toast")
    assert two_runs.command.endswith(" kernels=triton kernels.compile=true attn=flash precision=amp")
    button = tab.locator("#choices tr[data-preset] .copy").nth(3)
    assert button.get_attribute("data-command") == fourth.command
    button.click()
    toast_has_command = "command => document.querySelector('#toast').textContent.includes(command)"
    tab.wait_for_function(toast_has_command, arg=fourth.command)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("panel", ["speed", "memory", "tradeoff"])
def test_the_box_of_a_hover_is_beside_its_mark_and_inside_its_panel(source, open_page, panel, width):
    tab = open_page(source.folder, width)
    marks = tab.locator(f"#{panel} .barlayer .point path, #{panel} .scatterlayer .point")
    for number in (0, marks.count() // 2, marks.count() - 1):
        mark = marks.nth(number)
        mark.scroll_into_view_if_needed()
        mark.hover(force=True)
        tab.wait_for_selector("#hover.on")
        tab.wait_for_timeout(100)  # Plotly reports a move of the pointer only after 50 ms
        box, bar = tab.locator("#hover").bounding_box(), mark.bounding_box()
        card = tab.locator(f"#{panel}").bounding_box()
        assert card["x"] - 1 <= box["x"]
        assert box["x"] + box["width"] <= card["x"] + card["width"] + 1
        gaps = []
        for side, size in (("x", "width"), ("y", "height")):
            gaps += [box[side] - bar[side] - bar[size], bar[side] - box[side] - box[size]]
        assert 0 < max(gaps) < 20


PHONE = {"width": 390, "is_mobile": True, "has_touch": True}


@pytest.mark.parametrize("screen", [PHONE, {"width": 800}], ids=["phone", "window"])
def test_nothing_is_wider_than_the_screen(source, open_page, screen):
    tab = open_page(source.folder, **screen)
    assert tab.evaluate("document.documentElement.scrollWidth") <= screen["width"]
    elements = "[...document.querySelectorAll('.plot, .values, .table td, #speed text')]"  # .values scrolls its cells
    right = tab.evaluate(f"Math.max(...{elements}.map(e => e.getBoundingClientRect().right))")
    assert right <= screen["width"]


def test_the_page_names_what_failed_and_what_is_not_measured(source, open_page, tmp_path):
    text = open_page(source.folder).inner_text("#failures")
    for part in (
        "eager · eager",
        "oom",
        "unavailable: attn=fa3 <needs> a GPU",
        "wrong: loss error 3.1e-01, bound",
    ):
        assert part in text
    missing = "parity", "memory", "receipt", "perf/laps_s"
    write_row(tmp_path / "1-old", {key: value for key, value in make_row().items() if key not in missing})
    write_report(tmp_path)
    tab = open_page(tmp_path)
    assert set(drawn_traces(tab)) == {"speed", "tradeoff"}
    lines = tab.locator("#missing li").all_inner_texts()
    assert len(lines) == 10
    assert all("python " in line for line in lines)


def test_markup_in_a_row_is_shown_as_text(open_page, tmp_path):
    """Names, reasons and commands come from files. The page must not run what is in them."""
    script = "<script>document.title=1</script>"
    status = {"status": f"failed: {script}", "command": f"python train.py 'data.path=\"{script}\"'"}
    write_row(tmp_path / "1", make_row() | {"env": make_row()["env"] | {"device": f"GPU {script}"}})
    write_row(tmp_path / "2", {"name": script, **status})
    write_report(tmp_path)
    tab = open_page(tmp_path)
    title = f"hotswap: what was measured in {tmp_path.name}"
    assert (tab.title(), tab.inner_text("h1")) == (title, f"{title} (GPU {script})")
    assert script in tab.inner_text("#notes")
    assert f"failed: {script}" in tab.inner_text("#failures")
    assert script in tab.locator("#failures .copy").get_attribute("data-command")


def test_a_folder_in_results_has_a_report(open_page, tmp_path):
    """The report also shows old rows, which have no timed intervals, parity, memory or receipt."""
    folder = shutil.copytree(ROOT / "results/h200", tmp_path / "h200")
    shutil.copy(ROOT / "results/archive/h200/train.jsonl", folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "perf/laps_s" not in row]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, source = write_report(folder)
    tab = open_page(folder)
    tab.locator("#speed .all").click()  # the figure opens with its first bars
    traces = drawn_traces(tab)
    complete = [row for row in rows if row["status"] == "ok" and not row["config"]["train"]["eval_every"]]
    speeds = [row["perf/tokens_per_sec"] for row in complete if row["perf/tokens_per_sec"]]  # one row has one step
    assert sorted(traces["speed"][0]["x"]) == sorted(speeds)
    assert all(choice.ratio is None for choice in source.measured_choices)
    eager = [choice for choice in source.measured_choices if choice.name.startswith("eager ·")]
    assert {choice.base.name for choice in eager} == {"compile · sdpa"}
    assert {trace["name"] for trace in traces["roofline"]} >= {"norm", "attention", "mlp", "loss"}


def test_the_picture_of_a_folder_in_results_shows_one_comparison(monkeypatch, tmp_path):
    """speed.png has the largest group of comparable choices among the rows of the device, here a sample of them."""
    from matplotlib.axes import Axes

    titles, barh = [], Axes.barh
    monkeypatch.setattr(Axes, "barh", lambda *args, **options: titles.append(args[1]) or barh(*args, **options))
    folder = tmp_path / "h200"
    folder.mkdir()
    rows = (ROOT / "results/h200/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(rows[-60:]))
    _, source = write_report(folder)
    measured = source.measured_choices
    base, count = Counter(choice.base.title for choice in measured).most_common(1)[0]
    assert count < len(measured)
    shown = [choice for choice in measured if choice.base.title == base]
    assert [*titles[0]] == [axis_label(choice) for choice in shown]
    assert len(titles[0]) == count


def test_report_md_has_the_table_the_pictures_and_the_failures(source):
    text = (source.folder / "report.md").read_text()
    assert text.startswith("# mine\n\nEnvironment: device NVIDIA H200; driver 580.159.04; cuda 13.0; ")
    assert "\n\nEach choice is compared with the baseline of its settings" in text
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    cells = next(cells for cells in table if cells[0].startswith("triton + compile · flash (gpt2_124m · amp)"))
    assert str(source.measured_choices[number_of_two_runs(source)].ratio) in cells[2]
    assert "2 runs" in cells[1]
    parity = "holds, loss 2.1e-03 of 1.0e-02, gradient 3.4e-03 of 2.0e-02"
    assert cells[3:] == ["50.0%", "19.4", "24.1 s", "5.800", "cold", parity]
    assert "![speed](speed.png)" in text
    assert "| eager · eager" in text
    assert "longest T, training" in [cell for cells in table for cell in cells]
    assert [cell for cells in table for cell in cells].count("**2,129,920**") == 1


def test_wandb_gets_the_table_and_the_page(called, tmp_path, monkeypatch):
    """The run is offline, and W&B's own command reads it back."""
    pytest.importorskip("wandb", reason="W&B is not installed")
    for key, value in {"HOME": tmp_path, "NETRC": tmp_path / "netrc", "WANDB_DATA_DIR": tmp_path / "data"}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    folder = write_sweep(tmp_path / "mine")
    code, out, err = called("report.py", report.main, folder, "--wandb")
    assert (code, err) == (0, "")
    run = Path(out.splitlines()[-1])
    assert run.parent == folder / "wandb"
    wandb = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(folder / "wandb")]
    lines = subprocess.run(wandb, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    start = next(record["run"] for record in records if record["type"] == "run")
    assert (start["job_type"], start["run_group"], start["project"]) == ("report", "mine", "hotswap")
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    page = next(artifact for artifact in artifacts if artifact["name"] == "mine-report")
    files = {content["path"]: Path(content["local_path"]) for content in page["manifest"]["contents"]}
    assert files["report.html"].read_bytes() == (folder / "report.html").read_bytes()
    [path] = run.glob("files/media/table/*.json")
    table = json.loads(path.read_text())
    speeds = [line[table["columns"].index("perf/tokens_per_sec")] for line in table["data"]]
    rows = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    measured = [row["perf/tokens_per_sec"] for row in rows if row["status"] == "ok"]
    assert sorted(filter(None, speeds)) == pytest.approx(sorted(measured))
    assert len(speeds) == len(rows)
