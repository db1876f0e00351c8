"""`python -m scripts.collect` as a command."""

import json

import pytest

from lab import rows
from scripts import collect

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
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row]
    write_run(tmp_path / "four", config, world_size=4)
    assert command("four")[1] == f"four -> {tmp_path / 'results' / 'h200x4' / file}\n"


def test_nothing_is_appended_when_one_folder_has_no_row_for_results(command, tmp_path):
    """That is the folder of an evaluation, or a folder without a row."""
    write_run(tmp_path / "run", TRAIN[0])
    write_run(tmp_path / "evaluation", EVALUATE)
    assert command("run", "evaluation") == (
        1,
        "",
        "error: results/ has no file for the row of evaluation; pass runs of train.py, scripts.generate or "
        "scripts.max_context\n",
    )
    code, out, err = command("run", "nowhere")
    assert (code, out) == (1, "")
    assert err == "error: no row in the result.json of nowhere; pass the folders of finished runs\n"
    assert command("--curves") == (1, "", "error: the following arguments are required: out/RUN\n")
    assert not (tmp_path / "results").exists()


def test_a_job_without_an_environment_is_left_out(command, tmp_path):
    write_run(tmp_path / "run", TRAIN[0])
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "result.json").write_text('{"status": "failed: killed"}')
    code, out, err = command("job", "run")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["job: left out, failed: killed", f"run -> {tmp_path / 'results/h200/train.jsonl'}"]
