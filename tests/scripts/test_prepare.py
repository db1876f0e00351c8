"""`python -m scripts.prepare` as a command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data import open_dataset
from scripts import prepare
from tests.data.test_dataset import config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """command("data=text", ...) -> (exit code, stdout, stderr), in this process."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(500)))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("prepare.py", prepare.main, *arguments, f"data.cache={tmp_path / 'cache'}")


def test_prepares_and_says_how_much_how_fast_and_where(command, tmp_path):
    code, out, err = command("data=text", "data.path=a.jsonl", "workers=2")
    assert (code, err) == (0, "")
    tokens = sum(len(f"document {i}") + 1 for i in range(500))
    data, speed, folder = out.splitlines()
    counts = [int(count.replace(",", "")) for count in re.findall(r"[\d,]+(?= (?:training|validation))", data)]
    assert sum(counts) == tokens
    assert re.fullmatch(r"speed    [\d,]+ tokens/s: 500 documents, [\d.]+ s, 2 workers", speed)
    shards = Path(folder.removeprefix("folder   "))
    dataset = open_dataset(config(tmp_path, path="a.jsonl"))  # what train.py opens
    assert dataset.train[0].path == shards / "train" / "000000.bin"
    assert "nothing to do" in command("data=text", "data.path=a.jsonl")[1].splitlines()[1]


def test_plain_lines_where_there_is_no_terminal(command, monkeypatch):
    monkeypatch.setattr(prepare, "EVERY_SECONDS", 0)
    lines = command("data=text", "data.path=a.jsonl")[1].splitlines()
    assert re.fullmatch(r"500 documents, [\d,]+ tokens, [\d,]+ tokens/s", lines[-4])


def test_a_large_set_may_be_prepared_by_hand(command):
    assert command("data=text", "data.path=a.jsonl", "data.prepare=by_hand")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=text"], r"error: data=text needs data.path=FILE"),
        (["data=text", "data.path=a.jsonl", "data.column=body"], r"error: .*a.jsonl, line 1: there is no column body"),
        (["data=text", "data.path=a.jsonl", "workers=0"], r"error: workers=0: it must be at least 1"),
        (["data=txet"], r"error: data=txet: no such choice; data is one of: fineweb_edu, hub"),
        (["worker=2"], r"error: unknown key worker; did you mean workers\?"),
    ],
)
def test_mistakes_are_one_line(command, arguments, message):
    code, _, err = command(*arguments)
    assert code == 1
    assert re.fullmatch(rf"{message}.*\n", err)


@pytest.mark.parametrize("sync", [1000, 10**6])
def test_interrupted_is_a_line_that_comes_true(command, monkeypatch, sync):
    """It goes on behind what was recorded, a record each `sync` tokens, or it begins again."""
    monkeypatch.setattr("data.pipeline.SYNC_TOKENS", sync)
    monkeypatch.setattr("data.pipeline.PIECE", 60)
    update = prepare.Progress.__call__

    def interrupt(self, documents, tokens):
        update(self, documents, tokens)
        if documents > 300:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare.Progress, "__call__", interrupt)
        code, _, err = command("data=text", "data.path=a.jsonl")
    assert code == 130
    again = command("data=text", "data.path=a.jsonl")[1]
    if sync == 1000:
        [recorded] = re.fullmatch(r"interrupted: the same command goes on after (\d+) documents\n", err).groups()
        assert 200 < int(recorded) <= 300
        assert f"goes on after {recorded} documents" in again
    else:
        assert err == "interrupted: the same command begins again\n"
        assert "goes on" not in again


def test_a_bar_on_a_terminal(command, monkeypatch):
    """Without the clutter of one: it is gone at the end, and the last lines stand alone."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = command("data=text", "data.path=a.jsonl")
    assert code == 0
    assert "tok/s" in out
    assert out.splitlines()[-1].startswith("folder   ")


def test_help_is_worth_reading():
    env = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run(
        [sys.executable, "-m", "scripts.prepare", "--help"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert "python -m scripts.prepare data=tinystories" in shown.stdout
    assert re.search(r"workers: null +# processes that tokenize", shown.stdout)
    assert re.search(r"val_fraction: 0.1 +# of the documents is held out", shown.stdout)
