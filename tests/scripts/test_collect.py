"""`python -m scripts.collect` as a command."""

import json

import pytest

from lab import rows
from scripts import collect
from tests.lab.test_rerun import HOSTILE_NAMES

# Command -> keys of its config that no other command has, and the file for its rows
TRAIN = {"train": {"batch_size": 4}}, "train.jsonl"
GENERATE = {"prompt": "a", "batch": 1}, "generate.jsonl"
MAX_CONTEXT = {"probe": None, "mode": "train"}, "context.jsonl"
EVALUATE = {"batches": None, "batch_size": 4}


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command in this process: command("run") -> (exit code, stdout, stderr). Rows go to `results`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    return lambda *arguments: called("collect.py", collect.main, *arguments)


def write_run(folder, config, **facts):
    """Write the folder of a run with only result.json, and return the row."""
    row = {"name": folder.name, "status": "ok", "config": config, "env": {"device": "NVIDIA H200"}} | facts
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(row))
    return row


@pytest.mark.parametrize(("config", "file"), [TRAIN, GENERATE, MAX_CONTEXT])
def test_a_row_goes_to_the_file_of_its_command_once(command, tmp_path, config, file):
    """On four GPUs, the folder in results/ has x4 in its name."""
    row = write_run(tmp_path / "run", config)
    path = tmp_path / "results" / "h200" / file
    for _ in range(2):
        assert command("run") == (0, f"run -> {path}\n", "")
    assert rows.read_whole(path) == [row]
    write_run(tmp_path / "four", config, world_size=4)
    assert command("four")[1] == f"four -> {tmp_path / 'results' / 'h200x4' / file}\n"
    assert command("four", "--suffix", "rungs")[1] == f"four -> {tmp_path / 'results' / 'h200x4-rungs' / file}\n"


def test_folders_without_a_row_for_results_are_skipped(command, tmp_path):
    """They are folders of an evaluation, of an interrupted job, and of a job that ended before it had an environment.

    All other rows are appended, and the exit status is 1.
    """
    kept = [write_run(tmp_path / name, TRAIN[0]) for name in ("first", "last")]
    write_run(tmp_path / "evaluation", EVALUATE)
    for name in ("interrupted", "failed"):
        (tmp_path / name).mkdir()
    (tmp_path / "failed" / "result.json").write_text('{"status": "failed: killed"}')
    path = tmp_path / "results/h200/train.jsonl"
    code, out, err = command("first", "evaluation", "interrupted", "failed", "last")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        f"first -> {path}",
        "evaluation: skipped, results/ has no file for its row",
        "interrupted: skipped, no row in its result.json",
        "failed: skipped, failed: killed",
        f"last -> {path}",
    ]
    assert rows.read_whole(path) == kept


def test_without_a_row_it_is_an_error(command, tmp_path):
    assert command("nowhere") == (
        1,
        "nowhere: skipped, no row in its result.json\n",
        "error: no row to collect; pass the folders of finished runs of train.py, scripts.generate or "
        "scripts.max_context\n",
    )
    assert command("--curves") == (1, "", "error: the following arguments are required: out/RUN\n")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: repr(name)[:20])
def test_a_row_whose_name_is_a_path_writes_nothing(command, tmp_path, name):
    write_run(tmp_path / "run", TRAIN[0] | {"seed": 1}, name=name)
    code, out, err = command("run", "--curves")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert not (tmp_path / "results").exists()
    assert command("run", "--beside", "../x")[2].startswith("error: ../x cannot name a file")


def test_a_device_or_a_number_of_gpus_that_is_a_path_writes_nothing(command, tmp_path):
    facts = [{"env": {"device": device}} for device in ("../..", "", 3, None, ["x"])] + [{"env": "x"}, {"env": None}]
    facts += [{"world_size": size} for size in ("4/../../x", 2.5, None, [4], True)] + [
        {"config": None},
        {"config": "train"},
    ]
    for number, changes in enumerate(facts):
        folder = tmp_path / str(number)
        write_run(folder, **({"config": TRAIN[0]} | changes))
        code, _, err = command(folder)
        assert (code, err.count("\n")) == (1, 1), changes
    assert not (tmp_path / "results").exists()


def test_a_curve_with_lost_lines_is_an_error(command, tmp_path):
    """Cut at a line, every line that is left is right. The row knows their number. Nothing is written."""
    write_run(tmp_path / "run", {**TRAIN[0], "seed": 1}, metrics_lines=2)
    for lines in ([], [{"step": 1, "train/loss": 5.0}]):
        rows.replace_rows(tmp_path / "run/metrics.jsonl", lines)
        lost = 2 - len(lines)
        message = f"error: run/metrics.jsonl has lost {lost} of 2 lines: restore the file\n"
        assert command("run", "--curves") == (1, "", message)
        assert not (tmp_path / "results").exists()
    rows.replace_rows(tmp_path / "run/metrics.jsonl", [{"step": step, "train/loss": 5.0} for step in (1, 2)])
    assert command("run", "--curves")[0] == 0
    assert len(rows.read_whole(tmp_path / "results/h200/curves/run-seed1.jsonl")) == 2
