"""The rows of a folder become choices with names, comparisons and colours, and unreadable files are reported."""

import errno
import itertools
import json
import os
import re
import statistics
from pathlib import Path

import pytest

from kernels.registry import OPS, TRAINING_OPS, impls
from lab.proof.receipt import AFTER_OPS, BEFORE_OPS
from lab.report import page
from lab.report.bench_panels import OP_COLOURS
from lab.report.choice_table import report_tables, wandb_table
from lab.report.choices import Choice
from lab.report.colours import DASHES, SYMBOLS, choice_colours, part_colours
from lab.report.describe import kernels_name
from lab.report.panels import choice_origin, speed_figure, tradeoff_figure
from lab.report.plot import plotly
from lab.report.source import read_source
from lab.report.tables import throughput
from lab.rows import append_rows
from lab.sweep import compare
from lab.sweep.table import write_sort
from runtime.config import UserError
from scripts import report
from tests.lab.report.sample_rows import ENV, make_config, make_generation_row, make_row, write_row, write_sweep
from tests.lab.test_rerun import HOSTILE_COMMANDS


def test_choices_that_differ_in_kernels_alone_are_compared(tmp_path):
    source = read_source(write_sweep(tmp_path / "sweep"))
    groups = {}
    for choice in source.measured_choices:
        groups.setdefault((choice.preset, choice.precision), []).append(choice)
        base = choice.base
        assert (base.preset, base.precision) == (choice.preset, choice.precision)
        assert choice.ratio == compare.ratio(choice.rows, base.rows)
    assert [len(group) for group in groups.values()] == [5, 5, 2]
    names = {(choice.name, choice.precision): choice for choice in source.measured_choices}
    assert names["triton · sdpa", "bf16"].base.name == "eager · sdpa"


def test_force_compares_all_choices(tmp_path):
    source = read_source(write_sweep(tmp_path / "sweep"), force=True)
    measured = source.measured_choices
    other = next(choice for choice in measured if (choice.preset, choice.precision) == ("gpt2_124m", "bf16"))
    assert other.base is source.choices[0]
    assert other.ratio_text == str(compare.ratio(other.rows, source.choices[0].rows))


def test_the_order_follows_the_ratio(tmp_path, results):
    """A ratio compares intervals in pairs, so it may contradict the medians that are the tokens/s."""
    laps = {"compile": [1.0] * 4 + [2.0] * 5, "eager": [0.6] * 5 + [1.4] * 4, "triton": [0.7] * 9}
    rows = [
        make_row(kernels) | {"perf/laps_s": seconds, "perf/tokens_per_sec": 1000 / statistics.median(seconds)}
        for kernels, seconds in laps.items()
    ]
    for number, row in enumerate(rows):
        write_row(tmp_path / "sweep" / str(number), row)
    source = read_source(tmp_path / "sweep")
    [table] = report_tables(source)
    places = [table.columns.index(name) for name in ("tokens/s", "of the baseline")]
    page = [[line.cells[place].split(" ")[0] for place in places] for line in table.lines]
    assert page == [["1,429", "2.857x"], ["1,667", "1.667x"], ["500", "baseline"]]
    head, *lines = wandb_table(source)
    assert [line[head.index("of the baseline")].split(" ")[0] for line in lines] == ["2.857x", "1.667x", "baseline"]
    append_rows(results / "h200/train.jsonl", rows)
    assert re.findall(r"\*\*([\d,]+)\*\*", throughput("h200")) == ["1,429", "1,667", "500"]


def test_a_choice_alone_at_its_settings_is_no_baseline(tmp_path, results):
    """Nothing is compared with it, in the page and in results/README.md. --force compares all."""
    rows = [make_row("compile"), make_row("compile", seed=1) | {"world_size": 2}]
    for number, row in enumerate(rows):
        write_row(tmp_path / str(number), row)
    source = read_source(tmp_path)
    assert {choice.ratio_text for choice in source.measured_choices} == {""}
    assert {choice.qualifier for choice in source.measured_choices} == {"1 GPU", "2 GPUs"}
    assert "of the baseline" not in report_tables(source)[0].columns
    [bars] = speed_figure(source.measured_choices, choice_colours(choice.name for choice in source.choices)).series
    assert [point.text for point in bars.points] == [f"{choice.speed:,.0f}" for choice in source.measured_choices]
    append_rows(results / "h200/train.jsonl", rows)
    assert "of compile" not in throughput("h200")
    assert "baseline" in {choice.ratio_text for choice in read_source(tmp_path, force=True).choices}


def test_the_fastest_mode_of_torch_compile_is_the_baseline(tmp_path, results):
    """In the page and in results/README.md. A first job with other kernels remains the baseline."""
    rows = [make_row("compile"), make_row("compile", scale=0.9), make_row("triton")]
    rows[1]["config"]["kernels"]["compile_mode"] = "max-autotune-no-cudagraphs"
    for number, row in enumerate(rows):
        write_row(tmp_path / "sweep" / str(number), row)
    [base] = {choice.base.name for choice in read_source(tmp_path / "sweep").measured_choices}
    assert base == "compile, max-autotune-no-cudagraphs · sdpa"
    write_row(tmp_path / "other" / "0", rows[2])
    write_row(tmp_path / "other" / "1", rows[1])
    assert {choice.base.name for choice in read_source(tmp_path / "other").measured_choices} == {"triton · sdpa"}
    append_rows(results / "h200/train.jsonl", rows)
    head, _, *lines = ([cell.strip() for cell in line.split("|")] for line in throughput("h200").splitlines()[2:])
    ratios = {line[head.index("kernels")]: line[head.index("of compile")] for line in lines}
    assert ratios["compile, max-autotune-no-cudagraphs"] == "1.000x"
    assert 0.85 < float(ratios["compile"].split("x")[0]) < 0.95


def test_a_peer_is_a_choice_of_its_own_that_is_compared_with_ours(tmp_path):
    """Its config is that of train.py, so only the row's kernels tell peers apart. A peer captures no steps."""
    rows = [make_row("compile"), make_row("compile", scale=1.2), make_row("compile", scale=1.1)]
    for row, name in zip(rows[1:], ("transformers 5.17.0 + torch.compile", "transformers 5.17.0 + Liger"), strict=True):
        row["kernels"] = {"peer": name, "attention": "sdpa", "compile": True}
        row["config"]["train"]["cuda_graph"] = False
    for number, row in enumerate(rows):
        write_row(tmp_path / str(number), row)
    choices = read_source(tmp_path).measured_choices
    assert sorted(choice.name.split(" · ")[0] for choice in choices) == sorted(map(kernels_name, rows))
    assert {choice.base.name for choice in choices} == {"compile · sdpa"}


def test_a_choice_has_the_median_speed_and_the_largest_peak_of_its_runs():
    figures = [(100.0, 3.0), (104.0, 5.0), (120.0, 4.0), (None, None)]
    keys = "perf/tokens_per_sec", "mem/peak_allocated_gib"
    choice = Choice([make_row() | dict(zip(keys, pair, strict=True)) for pair in figures])
    assert (choice.speed, choice.spread, choice.memory) == (104.0, (100.0, 120.0), 5.0)


def test_each_symbol_and_dash_has_a_mark_in_the_legend():
    script = (Path(page.__file__).parent / "page.js").read_text()
    marks = re.findall(r'"?([\w-]+)"?: "\S', script.partition("MARKS = {")[2].partition("};")[0])
    assert {*SYMBOLS, *DASHES} <= {*marks}


def test_a_colour_says_the_kernels_and_a_symbol_the_attention(tmp_path):
    presets = "eager", "compile", "triton", "triton+compile"
    attentions = impls("attention")
    for number, (kernels, attn) in enumerate(itertools.product(presets, attentions)):
        write_row(tmp_path / str(number), make_row() | {"config": make_config(kernels, attn=attn)})
    measured = read_source(tmp_path).measured_choices
    traces = plotly(tradeoff_figure(measured, choice_colours(choice.name for choice in measured)))["data"]
    looks = {tuple(trace["name"].split(" · ")): trace["marker"] for trace in traces if trace["mode"] == "markers"}
    assert len(looks) == len(presets) * len(attentions)
    for part, key in enumerate(("color", "symbol")):
        values = {}
        for name, marker in looks.items():
            values.setdefault(name[part], set()).add(marker[key])
        assert all(len(shown) == 1 for shown in values.values())
        assert len(set.union(*values.values())) == len(values)


def test_power_has_columns_if_a_row_has_it(tmp_path, results):
    """A row without such figures has empty cells, in the page and in the README."""
    figures = {"power/joules_per_token": 1 / 874.4, "power/at_limit": 0.98, "power/sm_mhz": 1515.0}
    rows = [make_row(), make_row("compile") | figures]
    for number, row in enumerate(rows):
        write_row(tmp_path / "sweep" / str(number), row)
    [table] = report_tables(read_source(tmp_path / "sweep"))
    names = ["tokens/J", "at power limit", "SM MHz"]
    cells = {line.choice.name: dict(zip(table.columns, line.cells, strict=True)) for line in table.lines}
    assert [cells["compile · sdpa"][name] for name in names] == ["874", "98%", "1,515"]
    assert [cells["eager · sdpa"][name] for name in names] == ["", "", ""]
    append_rows(results / "h200/train.jsonl", rows)
    head, _, first, second = (line.split("|") for line in throughput("h200").splitlines()[2:])
    places = [[cell.strip() for cell in head].index(name) for name in names]
    assert [[line[place].strip() for place in places] for line in (first, second)] == [
        ["874", "98%", "1,515"],
        [""] * 3,
    ]


def test_every_backend_has_a_colour_of_its_own():
    """A backend that is a family of kernels has the family's colour."""
    colours = choice_colours((f"triton · {number}" for number in range(20)), impls("attention"))
    assert colours["triton"] == colours["triton · 0"]
    assert len({colours[impl] for impl in impls("attention")}) == len(impls("attention"))


def test_every_kernel_family_has_a_colour_and_every_op_another():
    families = [*BEFORE_OPS, *OPS, *AFTER_OPS]
    assert len(set(part_colours(families).values())) == len(families) + 1  # and "other"
    assert set(OP_COLOURS) == set(TRAINING_OPS)
    assert len(set(OP_COLOURS.values())) == len(TRAINING_OPS)


def test_a_file_that_cannot_be_read_is_named(called, tmp_path):
    for name, text in {"1": json.dumps(make_row()), "2": json.dumps(make_row())[:99], "3": "[1]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    assert called("report.py", report.main, tmp_path)[0] == 0
    sentence = f"Left out, because they are damaged or lack values: {tmp_path}/2/result.json; {tmp_path}/3/result.json"
    assert f"{sentence}." in (tmp_path / "report.md").read_text()
    (tmp_path / "kernels.jsonl").write_bytes(b"\xff\xfe\x00\n" + b"[" * 100_000)
    assert called("report.py", report.main, tmp_path)[0] == 0
    sentence += f"; {tmp_path}/kernels.jsonl, line 1; {tmp_path}/kernels.jsonl, line 2."
    assert sentence in (tmp_path / "report.md").read_text()


BAD_ROWS = {
    "no config": {key: value for key, value in make_row().items() if key != "config"},
    "a text as a speed": make_row() | {"perf/tokens_per_sec": "fast"},
    "no environment": make_row() | {"env": None},
    "a number as a config": make_row() | {"config": 3},
    "a number of 401 digits": make_row() | {"perf/tokens_per_sec": 10**400},
}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_that_the_page_cannot_show_is_named(called, tmp_path, bad):
    write_row(tmp_path / "1", make_row("compile"))
    write_row(tmp_path / "2", bad)
    code, _, err = called("report.py", report.main, tmp_path)
    assert (code, err) == (0, "")
    text = (tmp_path / "report.md").read_text()
    assert "compile" in text
    assert f"Left out, because they are damaged or lack values: {tmp_path}/2/result.json." in text


def test_rows_of_a_wrong_precision_are_sorted_as_text(called, tmp_path):
    for number, value in enumerate(("bf16", None, 3)):
        write_row(tmp_path / str(number), make_row() | {"config": make_config() | {"precision": value}})
    assert called("report.py", report.main, tmp_path)[::2] == (0, "")


@pytest.mark.parametrize("command", HOSTILE_COMMANDS, ids=lambda command: repr(command)[:60])
def test_a_command_that_is_not_ours_is_not_copied(command):
    """Neither by the button, nor by a click on a point, and W&B's table has none."""
    choice = Choice([make_row() | {"command": command}])
    assert choice.command == ""
    assert choice_origin(choice).command == ""


def test_a_full_disk_leaves_the_last_report(called, tmp_path, monkeypatch):
    write_row(tmp_path / "1", make_row())
    assert called("report.py", report.main, tmp_path)[0] == 0
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}

    def fail(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    code, _, err = called("report.py", report.main, tmp_path)
    assert (code, err) == (1, f"error: {tmp_path}/report.html: No space left on device\n")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.*")} == before


def test_an_error_without_a_file_says_what_happened(called, tmp_path, monkeypatch):
    """An error of the network, such as requests raises, is an OSError whose filename and strerror are None."""

    def fail(*_):
        raise ConnectionError("no answer from W&B")

    write_row(tmp_path / "1", make_row())
    monkeypatch.setattr(report, "publish", fail)
    code, _, err = called("report.py", report.main, tmp_path, "--wandb")
    assert (code, err) == (1, "error: no answer from W&B\n")


def test_a_mistake_is_one_line(called, tmp_path):
    with pytest.raises(UserError, match="name the folder of a sweep"):
        read_source(tmp_path)
    write_row(tmp_path / "evaluation", {"name": "evaluation", "status": "ok", "config": {"checkpoint": "out/mine"}})
    with pytest.raises(UserError, match="no rows of training without evaluations, of generation or of a benchmark"):
        read_source(tmp_path / "evaluation")
    code, out, err = called("report.py", report.main, tmp_path / "none")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert called("report.py", report.main, "--wandb")[0] > 0


def write_learning_rates(folder, losses, **figures):
    """Write the rows of a sweep of learning rates. Each has the lowest validation loss of its `losses`."""
    for number, (rate, loss) in enumerate(losses.items(), 1):
        row = make_row() | {"val/loss": 9.0, "val/loss/min": loss} | figures
        row["config"] |= {"optim": {"learning_rate": float(rate)}, "out_dir": f"out/then/{number}-learning_rate"}
        row["command"] += f" optim.learning_rate={rate}"
        write_row(folder / f"{number}-learning_rate", row)


def markdown_cells(folder):
    """Return the tables of report.md: [[cell, ...], ...]."""
    lines = (folder / "report.md").read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]


def test_the_report_of_a_sweep_names_what_varies_and_marks_the_lowest_loss(called, tmp_path):
    """As in the sweep's table, and in the order of its sweep.sort."""
    write_learning_rates(tmp_path, {"0.001": 2.75, "0.003": 2.5, "0.01": 3.0})
    orders = {}
    for sort in ("val/loss", "speed"):
        write_sort(tmp_path, sort)
        assert called("report.py", report.main, tmp_path)[0] == 0
        head, *lines = markdown_cells(tmp_path)
        cells = [dict(zip(head, line, strict=True)) for line in lines]
        assert {line["choice"]: line["val loss"] for line in cells} == {
            "eager · sdpa (optim.learning_rate=0.001)": "2.7500",
            "eager · sdpa (optim.learning_rate=0.003)": "best 2.5000",
            "eager · sdpa (optim.learning_rate=0.01)": "3.0000",
        }
        orders[sort] = [line["val loss"] for line in cells]
    assert orders["val/loss"] == ["best 2.5000", "2.7500", "3.0000"]
    assert orders["speed"][0] == "2.7500"  # as fast as the others, and the first job


def test_a_sweep_of_another_launcher_has_its_order_in_its_rows(tmp_path):
    write_learning_rates(tmp_path, {"0.001": 2.75, "0.003": 2.5})
    for path in tmp_path.glob("*/result.json"):
        row = json.loads(path.read_text())
        row["config"]["sweep"] = {"sort": "val/loss"}
        path.write_text(json.dumps(row))
    [table] = report_tables(read_source(tmp_path))
    losses = [line.cells[table.columns.index("val loss")] for line in table.lines]
    assert losses == ["best 2.5000", "2.7500"]


def test_runs_too_short_for_a_speed_have_their_loss_in_the_report(tmp_path):
    write_learning_rates(tmp_path, {"0.001": 2.75, "0.003": 2.5}, **{"perf/tokens_per_sec": None, "perf/laps_s": []})
    [table] = report_tables(read_source(tmp_path))
    losses = [line.cells[table.columns.index("val loss")] for line in table.lines]
    assert losses == ["2.7500", "best 2.5000"]


def test_a_single_loss_is_not_the_best(tmp_path):
    write_learning_rates(tmp_path, {"0.001": 2.75})
    [choice] = read_source(tmp_path).choices
    assert choice.loss_text == "2.7500"


def test_a_failed_job_has_its_log_in_the_report(called, tmp_path):
    """Also one with a wrong kernel, and one that ended before it had a config. The sweep's folder may be renamed."""
    write_learning_rates(tmp_path, {"0.001": 2.75, "0.003": 2.5, "1e9": 3.0, "2e9": 3.0, "3e9": 3.0})
    statuses = ["unavailable: no GPU", "failed: the run has diverged", "failed: why", "wrong: norm=mine raised"]
    for number, status in enumerate(statuses, 2):
        folder = tmp_path / f"{number}-learning_rate"
        row = json.loads((folder / "result.json").read_text()) | {"status": status, "name": folder.name}
        if number == 4:
            del row["config"]
        (folder / "result.json").write_text(json.dumps(row))
        (folder / "log.txt").touch()
    assert called("report.py", report.main, tmp_path)[0] == 0
    place = markdown_cells(tmp_path).index(["run", "reason", "log"])
    assert markdown_cells(tmp_path)[place + 1 :] == [
        ["eager · sdpa (optim.learning_rate=0.003)", "unavailable: no GPU", ""],
        ["eager · sdpa (optim.learning_rate=1e9)", "failed: the run has diverged", "3-learning_rate/log.txt"],
        ["4-learning_rate", "failed: why", "4-learning_rate/log.txt"],
        ["eager · sdpa (optim.learning_rate=3e9)", "wrong: norm=mine raised", "5-learning_rate/log.txt"],
    ]
    for number in (3, 4, 5):
        (tmp_path / f"{number}-learning_rate/log.txt").unlink()
    assert report_tables(read_source(tmp_path))[-1].columns == ["run", "reason"]


@pytest.mark.parametrize("command", [None, 3, "python 'train.py", "x" * 200_000], ids=["none", "3", "quote", "long"])
def test_choices_whose_commands_do_not_tell_them_apart_are_numbered(tmp_path, command):
    for seed in (1, 2):
        row = make_row() | {"command": command}
        row["config"]["seed"] = seed
        write_row(tmp_path / str(seed), row)
    assert [choice.qualifier for choice in read_source(tmp_path).choices] == ["choice 0", "choice 1"]


def test_folders_side_by_side(called, tmp_path):
    """A later commit has a new setting, and its machine has another name."""
    for folder, scale, env in (("old", 1.0, ENV), ("new", 0.9, ENV | {"git_commit": "abcdef12"})):
        for number, kernels in enumerate(("eager", "triton")):
            row = make_row(kernels, scale=scale) | {"env": env}
            if folder == "new":
                row["config"]["invented"] = 1
            write_row(tmp_path / folder / str(number), row)
    write_row(tmp_path / "new" / "2", make_row("compile"))
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    code, out, _ = called("report.py", report.main, old, new)
    assert code == 0
    head, _, triton, eager, _, _, note = out.strip().splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["choice", old, new, f"{new} / {old}"]
    assert triton.startswith("| triton · sdpa")
    for line in (triton, eager):
        assert re.search(r"1\.1\d\dx \(1\.\d+ to 1\.\d+, 1 run\)", line)
    assert note == f"- {new}: git_commit: abcdef12, baseline f3adfe01"
    write_row(tmp_path / "other" / "1", make_row(precision="bf16"))
    code, _, err = called("report.py", report.main, tmp_path / "old", tmp_path / "other")
    assert code == 1
    assert "have no measured choice in common" in err


def test_a_generation_is_not_compared_with_a_training(called, tmp_path):
    """Their configs have few keys in common, and these are equal."""
    write_row(tmp_path / "old" / "1", make_generation_row("blocks", "compile"))
    write_row(tmp_path / "new" / "1", make_row("compile", precision="bf16"))
    code, _, err = called("report.py", report.main, tmp_path / "old", tmp_path / "new")
    assert code == 1
    assert "have no measured choice in common" in err


def test_a_backend_that_is_slower_than_eager_has_a_column(tmp_path, results):
    """In the page, in report.md and in the README. Older rows have no key `slower`."""
    known = {"ms": 7.29, "baseline": "eager", "baseline_ms": 3.42, "at": None, "date": "2026-11-27"}
    rows = [make_row(), make_row("compile") | {"slower": {}}, make_row("triton") | {"slower": {"attention": known}}]
    for number, row in enumerate([*rows, make_generation_row() | {"slower": {"mlp": known}}]):
        write_row(tmp_path / "sweep" / str(number), row)
    source = read_source(tmp_path / "sweep")
    training, generation = report_tables(source)
    cells = {line.choice.name: dict(zip(training.columns, line.cells, strict=True)) for line in training.lines}
    marks = {name: cell["slower than eager"] for name, cell in cells.items()}
    assert marks == {"eager · sdpa": "", "compile · sdpa": "", "triton · sdpa": "attention 2.13x"}
    [line] = generation.lines
    assert dict(zip(generation.columns, line.cells, strict=True))["slower than eager"] == "mlp 2.13x"
    slow = next(choice for choice in source.measured_choices if choice.row.get("slower"))
    assert "slower than eager here: 7.29 ms beside 3.42" in choice_origin(slow).hover
    append_rows(results / "h200/train.jsonl", rows)
    head, _, *lines = ([cell.strip() for cell in line.split("|")] for line in throughput("h200").splitlines()[2:])
    assert sorted(line[head.index("slower than eager")] for line in lines) == ["", "", "attention 2.13x"]


def test_rows_without_a_slower_backend_have_no_such_column(tmp_path):
    for number, row in enumerate([make_row(), make_row("compile") | {"slower": {}}]):
        write_row(tmp_path / str(number), row)
    [table] = report_tables(read_source(tmp_path))
    assert "slower than eager" not in table.columns
