"""`python -m scripts.prepare` as a command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data import open_dataset
from scripts import prepare
from tests.data.test_dataset import data_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command in this process: command("data=text", ...) -> (exit code, stdout, stderr)."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(500)))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("prepare.py", prepare.main, *arguments, f"data.cache={tmp_path / 'cache'}")


def test_the_command_prints_tokens_speed_and_folder(command, tmp_path):
    code, out, err = command("data=text", "data.path=a.jsonl", "workers=2")
    assert (code, err) == (0, "")
    tokens = sum(len(f"document {i}") + 1 for i in range(500))
    data, speed, folder = out.splitlines()
    counts = [int(count.replace(",", "")) for count in re.findall(r"[\d,]+(?= (?:training|validation))", data)]
    assert sum(counts) == tokens
    assert re.fullmatch(r"speed    [\d,]+ tokens/s: 500 documents, [\d.]+ s, 2 workers", speed)
    shards = Path(folder.removeprefix("folder   "))
    dataset = open_dataset(data_config(tmp_path, path="a.jsonl"))  # as train.py does
    assert dataset.train[0].path == shards / "train" / "000000.bin"
    assert "the shards existed already" in command("data=text", "data.path=a.jsonl")[1].splitlines()[1]


def test_progress_is_plain_lines_when_there_is_no_terminal(command, monkeypatch):
    monkeypatch.setattr(prepare, "LINE_SECONDS", 0)
    lines = command("data=text", "data.path=a.jsonl")[1].splitlines()
    assert re.fullmatch(r"500 documents, [\d,]+ tokens, [\d,]+ tokens/s", lines[-4])


def test_a_data_set_with_prepare_by_hand_is_prepared(command):
    assert command("data=text", "data.path=a.jsonl", "data.prepare=by_hand")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=text"], r"error: data=text needs data.path: a file"),
        (["data=text", "data.path=a.jsonl", "data.column=body"], r"error: .*a.jsonl, line 1: there is no column body"),
        (["data=text", "data.path=a.jsonl", "workers=0"], r"error: workers=0: it must be at least 1"),
        (["data=txet"], r"error: data=txet: no such choice; data is one of: fineweb_edu, hub"),
        (["worker=2"], r"error: unknown key worker; did you mean workers\?"),
    ],
)
def test_a_mistake_prints_one_line(command, arguments, message):
    code, _, err = command(*arguments)
    assert code == 1
    assert re.fullmatch(rf"{message}.*\n", err)


def test_an_interrupted_preparation_resumes_after_its_last_record(command, monkeypatch):
    monkeypatch.setattr("data.pipeline.RECORD_EVERY_TOKENS", 1000)
    monkeypatch.setattr("data.pipeline.PIECE_CHARACTERS", 60)
    update = prepare.Progress.__call__

    def interrupt(self, documents, tokens):
        update(self, documents, tokens)
        if documents > 300:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare.Progress, "__call__", interrupt)
        code, _, err = command("data=text", "data.path=a.jsonl")
    assert code == 130
    second_out = command("data=text", "data.path=a.jsonl")[1]
    assert err == "interrupted: the same command resumes from its last record\n"
    [recorded] = re.findall(r"resumes after (\d+) documents", second_out)
    assert 200 < int(recorded) <= 300


def test_progress_is_a_bar_on_a_terminal(command, monkeypatch):
    """The bar disappears at the end, so the last line is the folder."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = command("data=text", "data.path=a.jsonl")
    assert code == 0
    assert "tok/s" in out
    assert out.splitlines()[-1].startswith("folder   ")


def test_help_shows_a_command_and_the_comments_of_keys():
    env = {**os.environ, "COLUMNS": "200"}
    process = subprocess.run(
        [sys.executable, "-m", "scripts.prepare", "--help"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert "python -m scripts.prepare data=tinystories" in process.stdout
    assert re.search(r"workers: null +# processes that tokenize", process.stdout)
    assert re.search(r"val_fraction: 0.1 +# share of the documents for validation", process.stdout)
