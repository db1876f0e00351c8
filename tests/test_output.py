"""Output that cannot be written: a full disk, a closed stream, a pipe whose reader has ended, a closed terminal.

A command that records something goes on without its lines. A command that only prints ends.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.row import read_row
from tests.test_train import QUICK, ROOT, metrics

KINDS = "full", "closed", "pipe"  # a stream may also be "open"


def run_with_streams(command, kinds, folder, **options):
    """Run a command whose two streams are "open" or of these KINDS. Return its exit code, and what it could print."""
    redirections = [f"{number}>&-" for number, kind in enumerate(kinds, 1) if kind == "closed"]
    words = ["sh", "-c", f'exec "$0" "$@" {" ".join(redirections)}', *command]
    reader, broken = os.pipe()
    os.close(reader)
    files = [folder / f"stream{number}" for number, _ in enumerate(kinds, 1)]
    with open("/dev/full", "wb") as full, files[0].open("wb") as out, files[1].open("wb") as err:
        streams = [{"full": full, "pipe": broken}.get(kind, file) for kind, file in zip(kinds, (out, err), strict=True)]
        done = subprocess.run(words, stdout=streams[0], stderr=streams[1], timeout=300, **options)
    os.close(broken)
    return done.returncode, *(file.read_text() for file in files)


@pytest.mark.parametrize("kinds", [kinds for kind in KINDS for kinds in ((kind, "open"), ("open", kind), (kind, kind))])
@pytest.mark.usefixtures("quick_python")
def test_a_run_goes_on_without_output(tmp_path, monkeypatch, kinds):
    """It prints its lines and a warning, and ends with its row and its last checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/nonexistent")  # makes a warning
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    words = [*QUICK, "train.checkpoint_every=2", "train.max_steps=3"]
    command = [sys.executable, str(ROOT / "train.py"), *words, f"data.cache={tmp_path}/tokens"]
    code, out, err = run_with_streams(command, kinds, tmp_path, cwd=tmp_path)
    assert code == 0, (out, err)
    assert read_row(Path("run"))["status"] == "ok"
    assert Path("run/checkpoints/step-000003/manifest.json").exists()
    assert [line["step"] for line in metrics()] == [1, 2, 3]
    assert out.endswith("done     run/result.json\n") == (kinds[0] == "open")
    assert err.startswith("warning: this user has no home folder") == (kinds[1] == "open")


COMMAND = """
import sys
from runtime.signals import exit_quietly
from common.terminal import outlive_output
with exit_quietly():
    if {records}:
        outlive_output()
    for number in range(3):
        print(number, "a line of many", flush=number < 2)
        print("a warning", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("kind", "records", "expected"),
    [
        ("full", True, (0, "")),
        ("pipe", True, (0, "")),
        ("closed", True, (0, "")),
        ("full", False, (1, "error: stdout: No space left on device\n")),
        ("pipe", False, (141, "")),
        ("closed", False, (0, "")),
    ],
)
@pytest.mark.parametrize("unbuffered", [True, False])
def test_a_command_that_only_prints_ends_without_output(tmp_path, monkeypatch, kind, records, expected, unbuffered):
    """One that records something goes on. Python itself prints nothing, and its exit code is not 120."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1" if unbuffered else "")
    command = [sys.executable, "-c", COMMAND.format(records=records)]
    code, _, err = run_with_streams(command, (kind, "open"), tmp_path, cwd=ROOT)
    warnings = 3 if expected[0] == 0 else 0
    assert (code, err) == (expected[0], "a warning\n" * warnings + expected[1])
    assert run_with_streams(command, ("open", kind), tmp_path, cwd=ROOT)[:2] == (
        0,
        "".join(f"{number} a line of many\n" for number in range(3)),
    )


def test_the_version_is_not_cut_off_by_a_traceback(tmp_path):
    command = [sys.executable, "train.py", "--version"]
    assert run_with_streams(command, ("full", "open"), tmp_path, cwd=ROOT)[::2] == (
        1,
        "error: stdout: No space left on device\n",
    )


ROOM = """
import resource, sys
from common.terminal import outlive_output, set_up_streams
set_up_streams()
outlive_output()
print("before", flush=True)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
print("lost" * 10, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
print("after", flush=True)
"""


def test_lines_appear_again_when_the_disk_has_room(tmp_path):
    _, out, err = run_with_streams([sys.executable, "-c", ROOM], ("open", "open"), tmp_path, cwd=ROOT)
    assert (out, err) == ("before\nlosafter\n", "")


SLOW_READER = """
import os
from common.terminal import set_up_streams
set_up_streams()
os.set_blocking(1, False)  # ssh does so
print("x" * 10**6)
"""


def test_a_pipe_that_does_not_block_loses_nothing():
    reader = ["sh", "-c", f"'{sys.executable}' -c '{SLOW_READER}' | (sleep 0.3; wc -c)"]
    done = subprocess.run(reader, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("1000001", "")
