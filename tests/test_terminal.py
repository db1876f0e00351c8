"""Output on any terminal: without control characters, which could move the cursor, and in any encoding."""

import importlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.terminal import CONTROLS, printable, set_up_streams
from lab.context.search import attempt_line, summary
from lab.rerun import rerun_words
from lab.sweep.jobs import SweepJob
from runtime.config import UserError
from runtime.resume import find_end
from runtime.row import write_row
from runtime.tracker_process import TensorBoard
from scripts import collect, prepare
from tests.runtime.test_checkpoint import save

ROOT = Path(__file__).parents[1]
COMMANDS = ["train", *sorted(f"scripts.{path.stem}" for path in ROOT.glob("scripts/[a-z]*.py"))]
ESCAPE, SHOWN = "\x1b[2J", "\\x1b[2J"


def assert_shown(text, times=1):
    """Assert that the text has the control character, escaped, and no other one."""
    assert text.count(SHOWN) == times
    assert not {chr(code) for code in CONTROLS} & set(text)


def test_lines_with_texts_of_a_run(tmp_path):
    """A path, the status of an attempt, and the last line of a job's log, whose bar shows it."""
    folder = tmp_path / ESCAPE
    checkpoint = folder / "checkpoints/step-000001"
    save(checkpoint.parent, 1)
    write_row(folder, {"status": "ok"})
    limits = SimpleNamespace(max_steps=1, max_minutes=None)
    assert_shown(find_end(folder, checkpoint, limits, "name")[0])
    assert_shown(TensorBoard.view_line(folder))
    assert_shown(attempt_line("train", {"T": 128, "status": f"failed: {ESCAPE}"}))
    assert_shown(summary("train", {"limit": f"failed: {ESCAPE}"}, None))
    job = SweepJob(tmp_path / "1-base", [], [], [None])
    job.folder.mkdir()
    (job.folder / "log.txt").write_text(ESCAPE)
    job.command, job.start_time, job.timeout_status = "python train.py", time.monotonic(), None
    job.process = type("Ended", (), {"returncode": 1})
    assert_shown(job.complete_row())


def test_commands_print_paths_escaped(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lab.rows.RESULTS", tmp_path)
    (tmp_path / "a.txt").write_text("a few words\n" * 100)
    words = "data=text", "data.path=a.txt", f'data.cache="{tmp_path}/{ESCAPE}"', "workers=1"
    code, out, err = called("prepare.py", prepare.main, *words)
    assert (code, err) == (0, "")
    assert_shown(out, times=1)
    row = {"name": "run", "status": "ok", "config": {"train": {}}, "env": {"device": "cpu"}}
    (tmp_path / ESCAPE).mkdir(exist_ok=True)
    write_row(tmp_path / ESCAPE, row)
    code, out, _ = called("collect.py", collect.main, ESCAPE)
    assert code == 0
    assert_shown(out)


def test_the_command_of_a_row_is_printed_escaped():
    """A row may be somebody else's. Such a command is not run."""
    with pytest.raises(UserError) as error:
        rerun_words({"command": f"python train.py data.path='{ESCAPE}'"})
    assert_shown(printable(error.value))


def use_ascii(monkeypatch):
    """Replace stdout by one in ASCII, as PYTHONIOENCODING=ascii does. Return the buffer of its bytes."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True))
    return sys.stdout.buffer


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_what_the_terminals_encoding_lacks(called, monkeypatch, name):
    def print_and_end():
        print("\ufffd")
        sys.exit(0)

    monkeypatch.setattr("runtime.compat.shorten_argparse_errors", print_and_end)
    output = use_ascii(monkeypatch)
    assert called(f"{name}.py", importlib.import_module(name).main)[0] == 0
    assert output.getvalue() == rb"\ufffd" + b"\n"


def test_a_run_ends_well_in_ascii(hotswap, monkeypatch):
    output = use_ascii(monkeypatch)
    monkeypatch.setattr("lab.generation.sample.sample_text", lambda *_: "\u00e9\ufffd")
    words = "+experiment=smoke", "train.max_steps=1", "train.eval_every=0", "model.n_layer=1", "out_dir=run"
    assert hotswap(*words)[0] == 0
    assert rb"sample   '\xe9\ufffd'" in output.getvalue()
    assert json.loads(Path("run/result.json").read_text())["status"] == "ok"
    assert Path("run/sample.txt").read_text(encoding="utf-8") == "\u00e9\ufffd"


def test_child_processes_print_in_any_encoding_too(monkeypatch):
    use_ascii(monkeypatch)
    set_up_streams()
    child = subprocess.run([sys.executable, "-c", "print('\ufffd')"], capture_output=True, check=True)
    assert child.stdout == rb"\ufffd" + b"\n"


def test_closed_streams_are_empty():
    """The new files have the numbers 0, 1 and 2, which a file of the program would have otherwise."""
    program = "from common.terminal import set_up_streams as accept\nimport sys\naccept()\nprint(sys.stdin.read())\n"
    program += "sys.exit([stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)] != [0, 1, 2])"
    command = f'exec "{sys.executable}" -c "{program}" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], cwd=ROOT).returncode == 0
