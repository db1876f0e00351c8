"""A run's files: figures that are not finite, a full disk, damaged lines, a deleted folder."""

import json
import os
import shutil
from pathlib import Path

import pytest

from runtime.config import UserError
from runtime.folders import make_folder
from runtime.row import read_row, without_nonfinite, write_row
from runtime.run import Run
from runtime.trackers import LoggerConfig, Tracker
from tests.test_train import QUICK, config

NO_TRACKER = Tracker(LoggerConfig("none", "offline", "hotswap", None, None, None, [], None, False))


def log_on_a_full_disk(folder):
    """Log a line to /dev/full, which refuses every write. Closing the file fails too, because it still has the line."""
    with Run(folder, "name", config(*QUICK), NO_TRACKER) as run:
        run.begin(kernels={}, env={})
        run.metrics.close()
        path = folder / "metrics.jsonl"
        path.unlink()
        path.symlink_to("/dev/full")
        run.metrics = path.open("a", buffering=1)
        run.log(1, {"train/loss": 1.0})


def test_nan_and_infinity_become_null_at_any_depth():
    row = {"a": float("nan"), "b": {"c": [1.0, float("inf")], "d": "nan"}}
    assert without_nonfinite(row) == {"a": None, "b": {"c": [1.0, None], "d": "nan"}}


def test_log_raises_one_line_when_the_disk_is_full(tmp_path):
    with pytest.raises(UserError, match=r"run cannot be written: No space left on device; free some space, or"):
        log_on_a_full_disk(tmp_path / "run")
    assert '"status": "failed: ' in (tmp_path / "run/result.json").read_text()


def log_steps(folder, *steps):
    """Log these steps in a folder of a run that resumes after step 0."""
    with Run(folder, "name", config(*QUICK), NO_TRACKER, resume=True) as run:
        run.truncate_metrics(10)
        run.begin(kernels={}, env={})
        for step in steps:
            run.log(step, {"train/loss": step / 7})


@pytest.mark.parametrize(
    "damage",
    [
        b'{"step": 5, "train/loss": 0.7142857142857143, "crc32": "12345678"}\n',
        b"\0" * 20 + b"\n",
        b'{"step": "3"}\n',
        b'{"pets": 3}\n',
        b"3\n",
        b"[" * 100_000 + b"\n",
        b"\xff\n",
    ],
)
def test_a_damaged_line_is_left_out_with_a_warning(tmp_path, capsys, damage):
    """A resumed run keeps the lines on both sides of it, and continues the file."""
    log_steps(tmp_path, *range(1, 11))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    later = b'{"step": 11}\n{"ste'  # of steps after the checkpoint, and incomplete
    path.write_bytes(b"".join([*lines[:4], damage, *lines[5:]]) + later)
    log_steps(tmp_path, 11, 12)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    assert path.read_bytes().splitlines(keepends=True)[:9] == [*lines[:4], *lines[5:]]
    assert capsys.readouterr().err == f"warning: {path}: line 5 is damaged and is left out\n"


def log_losses(folder, resume_after, losses):
    with Run(folder, "name", config(*QUICK), NO_TRACKER, resume=True) as run:
        run.truncate_metrics(resume_after)
        run.begin(kernels={}, env={})
        for step, loss in losses.items():
            run.log(step, {"train/loss": 1.0} | ({} if loss == "none" else {"val/loss": loss}))
    return read_row(folder).get("val/loss/min")


def test_the_row_has_the_lowest_validation_loss_of_the_lines_that_stay(tmp_path):
    """A resumed run drops the lines after its checkpoint, and their losses too."""
    assert log_losses(tmp_path, 0, {1: "none"}) is None
    assert log_losses(tmp_path, 1, {2: 4.0, 3: float("nan"), 4: 3.0, 5: 3.5, 6: 2.0}) == 2.0
    assert log_losses(tmp_path, 5, {6: "none"}) == 3.0
    assert log_losses(tmp_path, 6, {7: 2.5}) == 2.5


def test_lines_that_are_cut_off_are_counted_once(tmp_path, capsys):
    """Cut at each line's end, inside each line, and to nothing. The checkpoint of step 10 records ten lines."""

    def resume():
        with Run(tmp_path, "name", config(*QUICK), NO_TRACKER, resume=True) as run:
            run.truncate_metrics(10, expected=10)
            run.begin(kernels={}, env={})
            return run.lines

    newest = 12
    log_steps(tmp_path, *range(1, newest + 1))
    (tmp_path / "checkpoints").mkdir()  # without one, a run with an empty metrics.jsonl has never begun
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(newest + 1):
        for part in (b"", *([lines[kept][:7], lines[kept][:-1]] if kept < newest else [])):
            path.write_bytes(b"".join(lines[:kept]) + part)
            assert resume() == min(kept, 10)
            lost = 10 - kept
            warning = f"warning: {path} has lost {lost} line{'s' * (lost > 1)} up to step 10\n"
            assert capsys.readouterr().err == (warning if lost > 0 else "")
    path.write_bytes(b"".join([*lines[:4], b"#" + lines[4], *lines[6:]]))
    assert resume() == 8
    damaged, warning = capsys.readouterr().err.splitlines()
    assert damaged == f"warning: {path}: line 5 is damaged and is left out"
    assert warning == f"warning: {path} has lost 1 line up to step 10"


def test_a_damaged_lock_never_hides_a_row(tmp_path):
    """Each flip in the .lock of a copy, and files that no run wrote."""
    kill(Run(tmp_path / "run", "name", config(*QUICK), NO_TRACKER))
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    killed, copied = "stopped: killed", "stopped: killed, or copied while it ran"
    assert read_row(copy)["status"] == copied
    content = (copy / ".lock").read_bytes()
    number = int.from_bytes(content)
    flips = [(number ^ 1 << bit).to_bytes(len(content)) for bit in range(8 * len(content) - 8)]
    for damaged in [*flips, b"", b"1234\n", b"\xff\xfe", b"[" * 4000, b"\0" * 100_000, content[:9]]:
        (copy / ".lock").write_bytes(damaged)
        assert read_row(copy)["status"] in (killed, copied)
    (copy / ".lock").unlink()
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        make(copy / ".lock")
        assert read_row(copy)["status"].startswith("stopped: it was killed, or is still running")
        os.rename(copy / ".lock", tmp_path / f"odd-{len(os.listdir(tmp_path))}")


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
def test_an_odd_file_in_the_folder_is_one_line(tmp_path, name, kind):
    """It is neither read, which could hang or never end, nor replaced."""
    make = {"FIFO": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind]
    make(tmp_path / name)
    before = os.lstat(tmp_path / name)
    with pytest.raises(UserError, match=rf"^out_dir={tmp_path} cannot be written: {name}: (it is|Is) a") as error:
        Run(tmp_path, "name", config(*QUICK), NO_TRACKER, resume=True)
    assert "\n" not in str(error.value)
    assert os.lstat(tmp_path / name).st_ino == before.st_ino


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
def test_an_odd_row_is_no_row(tmp_path, kind):
    {"FIFO": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](
        tmp_path / "result.json"
    )
    assert read_row(tmp_path) is None


def kill(run):
    """Leave the folder as a SIGKILL does: close the run's files, and write no row."""
    run.lock.close()
    run.metrics.close()


@pytest.mark.parametrize("moment", ["before a line", "before a line, with another file", "after the last line"])
def test_a_run_whose_folder_is_deleted_is_not_ok(tmp_path, moment):
    folder = tmp_path / "run"

    def train():
        with Run(folder, "name", config(*QUICK), NO_TRACKER) as run:
            run.begin(kernels={}, env={})
            run.log(1, {})
            shutil.rmtree(folder)
            folder.mkdir()  # as a checkpoint does
            if moment.endswith("file"):
                (folder / "metrics.jsonl").touch()
            if moment.startswith("before"):
                run.log(2, {})

    with pytest.raises(UserError, match=r"run/metrics.jsonl was deleted or replaced during the run"):
        train()
    assert read_row(folder)["status"].startswith("failed: ")


def test_the_row_of_a_killed_run_says_so(tmp_path):
    """The row is there before begin(), which may come minutes later. A run that ends replaces it."""
    run = Run(tmp_path, "name", config(*QUICK), NO_TRACKER)
    assert read_row(tmp_path)["status"] == "stopped: it was killed, or is still running"
    kill(run)
    assert read_row(tmp_path)["status"] == "stopped: killed"
    run = Run(tmp_path, "name", config(*QUICK), NO_TRACKER)
    run.begin(kernels={}, env={})
    run.log(3, {"train/loss": 1.0})
    assert read_row(tmp_path)["status"] == "stopped: it was killed, or is still running"
    kill(run)
    assert read_row(tmp_path)["status"] == "stopped: killed after step 3"
    run = Run(tmp_path, "name", config(*QUICK), NO_TRACKER, resume=True)
    run.begin(kernels={}, env={})
    run.log(run.config.train.max_steps, {"train/loss": 1.0})
    kill(run)
    assert read_row(tmp_path)["status"] == f"stopped: killed after step {run.config.train.max_steps}"
    run.close("ok")
    assert read_row(tmp_path)["status"] == "ok"


def test_a_resumed_run_that_cannot_be_built_leaves_the_row(tmp_path):
    with Run(tmp_path, "name", config(*QUICK), NO_TRACKER) as run:
        run.begin(kernels={}, env={})
        run.log(1, {"train/loss": 1.0})
    row = (tmp_path / "result.json").read_bytes()
    with pytest.raises(UserError, match="no such data"), Run(tmp_path, "n", config(*QUICK), NO_TRACKER, resume=True):
        raise UserError("no such data")
    assert (tmp_path / "result.json").read_bytes() == row


def test_a_run_with_a_checkpoint_is_not_overwritten(tmp_path):
    """Without a line in metrics.jsonl, a run ended before its first step, unless it has checkpoints."""
    (tmp_path / "metrics.jsonl").touch()
    kill(Run(tmp_path, "name", config(*QUICK), NO_TRACKER))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"already holds a run \(metrics.jsonl\)"):
        Run(tmp_path, "name", config(*QUICK), NO_TRACKER)


def test_a_copy_of_a_running_run_is_not_called_killed(tmp_path):
    """Nobody locks the copy. The original, and the copy of a run that has ended, keep their status."""
    run = Run(tmp_path / "run", "name", config(*QUICK), NO_TRACKER)
    with pytest.raises(UserError, match="is in use by a running process"):
        Run(tmp_path / "run", "name", config(*QUICK), NO_TRACKER)
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    run.begin(kernels={}, env={})
    run.log(3, {"train/loss": 1.0})
    shutil.copytree(tmp_path / "run", tmp_path / "after")
    assert read_row(tmp_path / "before")["status"] == "stopped: killed, or copied while it ran"
    assert read_row(tmp_path / "after")["status"] == "stopped: killed after step 3, or copied while it ran"
    kill(run)
    assert read_row(tmp_path / "run")["status"] == "stopped: killed after step 3"
    kill(Run(tmp_path / "after", "name", config(*QUICK), NO_TRACKER, resume=True))
    assert read_row(tmp_path / "after")["status"] == "stopped: killed after step 3"


def test_a_status_is_shown_without_control_characters(tmp_path):
    """It may hold a path, and every table of rows prints it."""
    write_row(tmp_path, {"status": "failed: \x1b[2J\nis missing"})
    assert read_row(tmp_path)["status"] == "failed: \\x1b[2J is missing"


def test_a_broken_link_named_out_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out").symlink_to("purged")
    with pytest.raises(UserError, match=r"^out cannot be written: it is a broken link; choose an out_dir$"):
        make_folder(None, "run")


def test_the_folder_of_a_command_has_no_control_characters(tmp_path):
    with pytest.raises(UserError, match=r"/a\x1b\[2J has control characters; choose another folder"):
        make_folder(str(tmp_path / "a\x1b[2J"), "judge")


def test_files_are_on_the_disk_before_they_replace_others(tmp_path, disk):
    """config.yaml and result.json are written to another file, which is fsynced and then renamed."""
    with Run(tmp_path, "name", config(*QUICK), NO_TRACKER) as run:
        run.begin(kernels={}, env={})
    synced, renames = disk[::2], disk[1::2]
    assert renames == [
        (temporary, str(tmp_path / name))
        for temporary, name in zip(synced, ["result.json", "config.yaml", "result.json", "result.json"], strict=True)
    ]
