"""Each write of a run fails once: the run ends with a complete row, or with exit code 1 and one line."""

import builtins
import errno
import io
import itertools
import os
import shutil
import sys
from pathlib import Path

import pytest

from runtime import run
from runtime.row import KILLED, UNFINISHED, read_row
from scripts import evaluate, generate
from tests.test_resume import BASE, RESUME
from tests.test_train import metrics

SETTINGS = [*BASE, "train.checkpoint_every=2", "train.max_steps=4", "train.eval_every=2", "train.eval_batches=1"]
SETTINGS += ["train.sample_tokens=3", "train.keep_checkpoints=1"]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
PATH_EVENTS = "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.chmod", "os.truncate"


class Disk:
    """Counts the writes below the folder `run`. Write number `failing` fails, and with `stays` all later ones."""

    def __init__(self):
        self.reset(None)
        sys.addaudithook(self.watch)

    def reset(self, failing, code=errno.ENOSPC, stays=False):
        self.count, self.failing, self.code, self.stays, self.hit = 0, failing, code, stays, ""

    def write(self, path, what):
        if self.failing is None or not str(path).startswith("run"):
            return
        self.count += 1
        if self.count == self.failing or (self.stays and self.count > self.failing):
            self.hit = self.hit or f"{what} {path}"
            raise OSError(self.code, os.strerror(self.code), str(path))

    def watch(self, event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if writes or event in PATH_EVENTS:
            self.write(arguments[0], event)


class File(io.FileIO):
    """A file whose writes the disk counts."""

    def __init__(self, path, mode, disk, opener):
        super().__init__(path, mode, opener=opener)
        self.disk = disk

    def write(self, data):
        self.disk.write(self.name, "write")
        return super().write(data)


DISK = []


@pytest.fixture
def disk(monkeypatch):
    """The disk. An audit hook cannot be removed, so all tests share it."""
    if not DISK:
        DISK.append(Disk())
    [disk] = DISK
    opened, fsync = io.open, os.fsync

    def open_counted(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        if disk.failing is None or not str(file).startswith("run") or not set(mode) & set("wax"):
            return opened(file, mode, buffering, encoding, errors, newline, closefd, opener)
        binary = io.BufferedWriter(File(file, mode.replace("b", ""), disk, opener)) if buffering else None
        if "b" in mode:
            return binary or File(file, mode.replace("b", ""), disk, opener)
        return io.TextIOWrapper(binary, encoding, errors, newline, line_buffering=buffering == 1)

    def fsync_counted(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        disk.write(os.path.relpath(path), "fsync")
        fsync(handle)

    monkeypatch.setattr(builtins, "open", open_counted)
    monkeypatch.setattr(io, "open", open_counted)
    monkeypatch.setattr(os, "fsync", fsync_counted)
    yield disk
    disk.reset(None)


def run_with_failing_write(command, disk, number, code, stays):
    disk.reset(number, code, stays)
    try:
        exit_code, out, err = command()
    finally:
        hit = disk.hit
        disk.reset(None)
    return hit, exit_code, out, err


def assert_honest(hit, code, out, err):
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert all(line.startswith(("error: ", "warning: ")) for line in lines), (hit, err)
    if code == 0:
        assert (errors, read_row(Path("run"))["status"]) == ([], "ok"), (hit, err)
        assert [line["step"] for line in metrics()] == [1, 2, 3, 4], hit
        assert "done     run/result.json" in out
    else:
        assert (code, len(errors), "done     " in out) == (1, 1, False), (hit, code, err)
        row = read_row(Path("run")) or {}
        assert (row.get("status"), row.get("steps")) != ("ok", 4), (hit, err)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_one_failing_write(hotswap, disk, tmp_path, resumed, stays):
    """Every 40th write. With `stays`, the disk stays full, and nothing is written any more."""
    walk(hotswap, disk, resumed, stays, errno.ENOSPC, step=40)


@pytest.mark.exhaustive
def test_more_failing_writes(hotswap, disk):
    """Every 15th write of a resumed run. All walks over every write take 6 minutes on one core."""
    walk(hotswap, disk, resumed=True, stays=False, code=errno.EIO, step=15)


def walk(hotswap, disk, resumed, stays, code, step):
    if resumed:
        assert hotswap(*SETTINGS, "train.stop_after=2")[0] == 0
        Path("run").rename("half")
    for number in itertools.count(1, step):
        shutil.rmtree("run", ignore_errors=True)
        if resumed:
            shutil.copytree("half", "run", symlinks=True)
        hit, *results = run_with_failing_write(lambda: hotswap(*SETTINGS, RESUME), disk, number, code, stays)
        if not hit:
            assert number > 20
            break
        assert_honest(hit, *results)
        if results[0] == 1:  # the disk has room again
            assert hotswap(*SETTINGS, RESUME)[0] == 0, hit
            assert read_row(Path("run"))["status"] == "ok"


@pytest.fixture
def commands(hotswap, called):
    """{name: a function that runs the command in the folder it gets}. A trained model is in the folder `trained`."""
    model = "checkpoint=trained", "device=cpu", "precision=fp32"
    assert hotswap(*SETTINGS, "train.max_steps=1", "out_dir=trained")[0] == 0
    generated = "prompt=def", "max_new_tokens=3"
    return {
        "train": lambda folder: hotswap(*SETTINGS, "train.max_steps=1", f"out_dir={folder}"),
        "generate": lambda folder: called("generate.py", generate.main, *model, *generated, f"out_dir={folder}"),
        "evaluate": lambda folder: called("evaluate.py", evaluate.main, *model, "batches=1", f"out_dir={folder}"),
    }


@pytest.mark.parametrize("name", ["train", "generate", "evaluate"])
def test_a_final_row_that_cannot_be_written_is_an_error(commands, monkeypatch, name):
    """In the middle of a run it is a warning."""
    original = run.write_row

    def write_row(folder, row):
        if row["status"] != UNFINISHED:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/result.json")
        original(folder, row)

    monkeypatch.setattr(run, "write_row", write_row)
    code, out, err = commands[name]("run")
    *warnings, error = err.splitlines()
    line = (
        "out_dir=run cannot be written: result.json: No space left on device; free some space, or choose another folder"
    )
    assert (code, error) == (1, f"error: {line}")
    assert warnings == [f"warning: {line}"] * (name == "train")
    assert "done     " not in out
    assert read_row(Path("run"))["status"].startswith(KILLED)


@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_every_third_failing_write_of_another_command(commands, disk, name):
    for number in itertools.count(1, 3):
        shutil.rmtree("run", ignore_errors=True)
        hit, code, out, err = run_with_failing_write(lambda: commands[name]("run"), disk, number, errno.ENOSPC, True)
        if hit in ("", "os.rmdir run"):  # the command has ended
            assert number > 5
            break
        lines = err.splitlines()
        assert all(line.startswith(("error: ", "warning: ")) for line in lines), (hit, err)
        errors = sum(line.startswith("error: ") for line in lines)
        assert (code, errors, "done     " in out) == (1, 1, False), (hit, err)


def test_every_third_failing_write_of_a_sweep(hotswap, disk, monkeypatch):
    """The writes are the sweep's own, and its jobs fail at once. It ends, as no later job could leave a row."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    sweep = "-m", "+experiment=smoke", "attn=eager,sdpa", "out_dir=run"
    for number in itertools.count(1, 3):
        shutil.rmtree("run", ignore_errors=True)
        hit, code, out, err = run_with_failing_write(lambda: hotswap(*sweep), disk, number, errno.ENOSPC, True)
        if not hit:
            assert number > 10
            break
        assert (code, err.count("\n"), "done     " in out) == (1, 1, False), (hit, err)
        assert err.startswith("error: out_dir=run"), hit
        assert ": No space left on device; free some space, or choose another folder" in err, hit
