"""A run that is killed after its last checkpoint, and before its row: the resumed run completes what is missing."""

import errno
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import train
from common.files import write_json
from runtime.checkpoint import read_manifest, verify
from runtime.config import UserError
from runtime.row import UNFINISHED, write_row
from tests.test_parallel import BASE as PARALLEL
from tests.test_parallel import torchrun
from tests.test_resume import BASE, RESUME
from tests.test_train import metrics, row

SETTINGS = [*BASE, "train.checkpoint_every=5", "train.max_steps=10", "train.eval_every=5", "train.eval_batches=1"]
SETTINGS += ["train.sample_tokens=3", "device=cpu"]
LAST = "run/checkpoints/step-000010"
# tests.crashtest kills runs there, too, in forks of a process that computes nothing
NEEDS_FORK = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch with CUDA has no backward in forks")
FIGURES = "step", "tokens", "train/loss", "train/grad_norm", "train/lr", "train/refused_steps"
FIGURES += "val/loss", "val/loss/min"


def kill_at(operation, words, step):
    """Train in this process, a fork, and kill it at this operation on files, counted from the save of `step`.

    The file `operations` then has the number of operations so far.
    """
    count, counts = -1, os.open("operations", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def watch(event, arguments):
        nonlocal count
        if event == "os.mkdir" and count < 0 and str(arguments[0]).endswith(f"checkpoints/.step-{step:06d}"):
            count = 0
        if count >= 0 and (event == "open" or event.startswith("os.")):
            os.pwrite(counts, b"%d" % count, 0)
            if count == operation:
                signal.raise_signal(signal.SIGKILL)
            count += 1

    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.argv = ["train.py", *words]
    sys.addaudithook(watch)
    train.main()


def train_and_kill(tmp_path, operation, *words, step=10):
    """Train until the run is killed at this operation. Return whether that was before the end."""
    shutil.rmtree("run", ignore_errors=True)
    words = [*words, f"data.cache={tmp_path / 'tokens'}"]
    process = multiprocessing.get_context("fork").Process(target=kill_at, args=(operation, words, step))
    process.start()
    process.join(300)
    assert process.exitcode in (-signal.SIGKILL, 0)
    return process.exitcode != 0


def figures(folder):
    return [{key: line.get(key) for key in FIGURES} for line in metrics(folder)]


def best(folder):
    return Path(folder, "checkpoints/best").readlink()


def assert_completed(hotswap, *words):
    """Resume the run, and compare its row and its metrics with the undisturbed run's in the folder `whole`."""
    code, out, err = hotswap(*words, RESUME)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "done     run/result.json" or out.startswith("done     already: ")
    found, whole = row(), row("whole")
    assert found["status"] == "ok"
    assert found.keys() == whole.keys()
    assert [found.get(key) for key in ("steps", *FIGURES)] == [whole.get(key) for key in ("steps", *FIGURES)]
    assert figures("run") == figures("whole")
    assert Path("run/sample.txt").read_text() == Path("whole/sample.txt").read_text()
    assert best("run") == best("whole")


def assert_every_kill_is_completed(hotswap, tmp_path, operations, *words):
    assert hotswap(*words, "out_dir=whole")[0] == 0
    tried = 0
    for operation in operations:
        if not train_and_kill(tmp_path, operation, *words):
            break
        assert_completed(hotswap, *words)
        tried += 1
    return tried


@NEEDS_FORK
def test_a_run_that_is_killed_after_its_last_checkpoint_is_completed(hotswap, tmp_path):
    """The moments: in the checkpoint, just after it, and before and after the row that a sample follows."""
    assert assert_every_kill_is_completed(hotswap, tmp_path, (5, 21, 25, 29, 33), *SETTINGS) == 5


@NEEDS_FORK
@pytest.mark.exhaustive
def test_a_run_that_is_killed_at_any_moment_of_its_end_is_completed(hotswap, tmp_path):
    """Every sixth moment: all of them take 90 s, and the test above has some of the others."""
    assert assert_every_kill_is_completed(hotswap, tmp_path, range(0, 10_000, 6), *SETTINGS) >= 5


def lose_the_end(lost_files=()):
    """Leave a finished run as a kill does that came after its last checkpoint, and before everything else."""
    whole = row()
    facts = {key: whole[key] for key in ("name", "started", "command", "config", "kernels", "env")}
    write_row(Path("run"), facts | {"status": UNFINISHED})
    lines = Path("run/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("run/metrics.jsonl").write_text("".join(lines[:-1]))
    for name in lost_files:
        Path("run", name).unlink()


@pytest.mark.parametrize(
    ("words", "lost_files"),
    [
        ([], []),
        ([], ["result.json", "config.yaml"]),
        (["train.overfit=true"], []),
        (["train.max_steps=null", "train.max_minutes=0.002"], []),
        (["proof=true"], []),
        (["train.checkpoint_every=100"], []),  # the last checkpoint is the first one
    ],
)
@pytest.mark.usefixtures("quick_python")
def test_the_end_of_a_run_is_completed_from_its_last_checkpoint(hotswap, monkeypatch, words, lost_files):
    """Also the line of the step in metrics.jsonl, and what the tracker gets."""
    tracked = []
    monkeypatch.setattr("runtime.schedule.OVERFIT_LOSS", 100.0)  # the run is short
    monkeypatch.setattr("runtime.trackers.Tracker.finish", lambda self, row: tracked.append(dict(row)))
    settings = [*SETTINGS, "train.sample_tokens=0", *words]
    assert hotswap(*settings)[0] == 0
    whole, lines = row(), metrics()
    lose_the_end(lost_files)
    code, out, err = hotswap(*settings, RESUME)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "done     run/result.json"
    assert f"resumed  after the last step, {whole['steps']}: what follows it is missing" in out
    assert ("overfit  the loss of the only batch" in out) == ("train.overfit=true" in words)
    found = row()
    again = {"crc32", "receipt", "memory", "parity"}  # the proof is made again, without the first steps
    assert {key: value for key, value in found.items() if key not in again} == {
        key: value for key, value in whole.items() if key not in again
    }
    assert found.keys() == whole.keys()
    if "proof=true" in words:
        assert found["parity"] == {"ok": None, "why": "the run resumes from a checkpoint"}
        assert found["receipt"]["wrong"] is None
    assert [{**line, "crc32": None} for line in metrics()] == [{**line, "crc32": None} for line in lines]
    assert [sent["status"] for sent in tracked] == ["ok", "ok"]
    assert tracked[1].keys() == tracked[0].keys()


def test_a_finished_run_is_not_resumed_in_another_folder(hotswap):
    """Nothing is trained, so nothing is written."""
    assert hotswap(*BASE, "train.max_steps=2")[0] == 0
    for name in ("run", "run/checkpoints/step-000002"):
        code, out, err = hotswap(*BASE, "train.max_steps=2", f"train.resume={name}", "out_dir=new")
        line = "train.resume=run/checkpoints/step-000002 is of the run's last step; to train longer in new, raise"
        assert (code, out, err) == (1, "", f"error: {line} train.max_steps or train.max_minutes\n")
        assert not Path("new").exists()
    assert hotswap(*BASE, "train.max_steps=3", "train.resume=run", "out_dir=new")[0] == 0
    assert row("new")["steps"] == 3


def remove_from_manifest(path, *keys):
    facts = read_manifest(path)
    write_json(path / "manifest.json", {key: value for key, value in facts.items() if key not in keys})


def test_a_checkpoint_that_a_smaller_max_steps_makes_the_last_one(hotswap):
    """It has no row, so the figures of the run are lost."""
    assert hotswap(*BASE, "train.max_steps=8")[0] == 0
    write_row(Path("run"), row() | {"status": UNFINISHED})
    remove_from_manifest(Path("run/checkpoints/step-000008"), "row")
    code, out, err = hotswap(*BASE, "train.max_steps=8", RESUME)
    line = "error: run/checkpoints/step-000008 is of the run's last step, and the run's status is "
    status = "stopped: killed after step 8"
    assert (code, out, err) == (1, "", f"{line}{status}; start it again in another folder\n")


def test_a_run_whose_minutes_are_over_in_the_middle_ends_after_one_more_step(hotswap):
    """The evaluation before a save may take the run's last seconds. Then the checkpoint is not the last one."""
    settings = [*SETTINGS, "train.max_steps=null", "train.sample_tokens=0"]
    assert hotswap(*settings, "train.max_minutes=10", "train.stop_after=5")[0] == 0
    write_row(Path("run"), row() | {"status": UNFINISHED})
    code, _, err = hotswap(*settings, "train.max_minutes=0.0001", RESUME)
    assert (code, err, row()["status"], row()["steps"]) == (0, "", "ok", 6)


@pytest.mark.parametrize("status", ["ok", "wrong: parity", "failed: loss is nan", "oom"])
def test_another_end_of_a_run_stays(hotswap, status):
    """What failed after the loop is done again, but not what ended the loop: the checkpoint then has no row."""
    assert hotswap(*BASE, "train.max_steps=2")[0] == 0
    if status not in ("ok", "wrong: parity"):
        remove_from_manifest(Path("run/checkpoints/step-000002"), "row")
    write_row(Path("run"), row() | {"status": status})
    before = row()
    code, out, err = hotswap(*BASE, "train.max_steps=2", RESUME)
    assert row() == before
    if status == "ok":
        assert (code, err, out.startswith("done     already: ")) == (0, "", True)
    else:
        assert (code, out, f" status is {status}; start it again" in err) == (1, "", True)


def test_a_failure_after_the_loop_is_judged_again(hotswap, monkeypatch):
    settings = [*BASE, "train.max_steps=2", "train.overfit=true"]
    for _ in range(2):
        code, _, err = hotswap(*settings, RESUME)
        assert (code, err.startswith("error: train.overfit=true: after 2 steps")) == (1, True)
        assert row()["status"].startswith("failed: train.overfit=true")
    monkeypatch.setattr("runtime.schedule.OVERFIT_LOSS", 100.0)
    assert hotswap(*settings, RESUME)[::2] == (0, "")
    assert row()["status"] == "ok"


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.usefixtures("quick_python")
def test_the_parity_of_a_killed_process_stays(hotswap, is_right):
    """It compares the first steps, which the resumed process does not have. The rest of the proof is made again."""
    settings = [*SETTINGS, "train.sample_tokens=0", "proof=true", "model.dropout=0"]
    assert hotswap(*settings)[0] == 0
    whole = row()
    assert whole["parity"]["ok"]
    parity = whole["parity"] | {"ok": is_right}
    write_row(Path("run"), {key: whole[key] for key in whole if key != "receipt"} | {"status": "oom", "parity": parity})
    assert hotswap(*settings, RESUME)[0] == (0 if is_right else 1)
    assert row()["status"].startswith("ok" if is_right else "wrong: ")
    assert row()["parity"] == parity
    assert row().keys() == whole.keys()


@pytest.mark.usefixtures("quick_python")
def test_the_end_of_a_job_of_two_ranks_is_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = *PARALLEL, "train.checkpoint_every=4"
    assert torchrun(tmp_path, *settings)[0] == 0
    whole, lines = row(), metrics()
    lose_the_end()
    code, _, err = torchrun(tmp_path, *settings, RESUME)
    assert code == 0, err
    assert (row()["status"], row()["train/loss"], row().keys()) == ("ok", whole["train/loss"], whole.keys())
    assert [line["train/loss"] for line in metrics()] == [line["train/loss"] for line in lines]


def test_a_proof_is_not_made_with_other_kernels(hotswap):
    """The figures in the checkpoint are of the run's own kernels."""
    settings = [*SETTINGS, "train.sample_tokens=0"]
    assert hotswap(*settings)[0] == 0
    lose_the_end()
    code, _, err = hotswap(*settings, RESUME, "attn=eager", "proof=true")
    assert code == 1
    assert err.startswith("error: this run has ended, and only its proof is left, but attn changed since: ")
    code, _, err = hotswap(*settings, RESUME, "attn=eager")
    assert (code, err, row()["status"], row()["config"]["attn"]["impl"]) == (0, "", "ok", "sdpa")


@pytest.mark.parametrize("harm", ["flip", "FIFO", "EIO"])
def test_a_row_that_cannot_be_read_is_not_replaced(hotswap, monkeypatch, harm):
    """It may say `ok`, or that the proof was wrong."""
    assert hotswap(*SETTINGS)[0] == 0
    path = Path("run/result.json")
    before = path.read_bytes()
    if harm == "flip":
        path.write_bytes(before.replace(b'"ok"', b'"oj"', 1))
    elif harm == "FIFO":
        path.unlink()
        os.mkfifo(path)
    else:
        refuse = OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        monkeypatch.setattr("runtime.row.read_bytes", lambda name: refuse_to_read(refuse))
    left = path.lstat()
    code, out, err = hotswap(*SETTINGS, RESUME)
    assert (code, "done" in out) == (1, False)
    assert err.startswith("error: run/result.json is damaged or cannot be read, so the end of the run is not known: ")
    assert (path.lstat().st_ino, path.lstat().st_mtime_ns) == (left.st_ino, left.st_mtime_ns)


def test_a_run_without_a_checkpoint_whose_row_cannot_be_read_is_not_replaced(hotswap):
    settings = [*SETTINGS, "train.checkpoint_every=0"]
    assert hotswap(*settings)[0] == 0
    path = Path("run/result.json")
    path.write_bytes(before := path.read_bytes()[:-9])
    code, _, err = hotswap(*settings, RESUME)
    line = "error: run/result.json is damaged or cannot be read: restore the file, or delete it to start a new run\n"
    assert (code, err, path.read_bytes()) == (1, line, before)


def refuse_to_read(error):
    raise error


def test_a_refused_resume_does_not_change_the_row(hotswap, monkeypatch):
    assert hotswap(*SETTINGS)[0] == 0
    before = row()
    monkeypatch.setattr("runtime.checkpoint_folder.CheckpointFolder.begin", refuse)
    code, _, err = hotswap(*SETTINGS, "train.max_steps=12", RESUME)
    assert (code, err) == (1, "error: best cannot be read\n")
    assert row() == before


def refuse(self, steps_before):
    raise UserError("best cannot be read")


def test_the_copy_of_a_lost_run_is_not_replaced_by_a_new_run(hotswap, tmp_path):
    """A disk was lost, or another run has the same name."""
    settings = [*SETTINGS, "train.replicate_to=disk"]
    copy = Path("disk/run/step-000010")
    assert hotswap(*settings)[0] == 0
    shutil.rmtree("run")
    code, _, err = hotswap(*settings, RESUME)
    assert code == 1
    assert err.startswith(
        "error: train.replicate_to: disk/run holds the copy of another run of this name, step-000010, "
    )
    assert verify(copy)["step"] == 10
    assert not Path("run").exists()
    assert hotswap(*settings, f"train.resume={copy}", "train.max_steps=12")[0] == 0
    assert [path.name for path in copy.parent.iterdir()] == ["step-000012"]


def test_the_copy_of_a_run_in_the_working_directory_has_a_folder(hotswap, tmp_path, monkeypatch):
    Path("here").mkdir()
    monkeypatch.chdir("here")
    assert hotswap(*SETTINGS, "out_dir=.", f"train.replicate_to={tmp_path}/disk")[0] == 0
    assert verify(tmp_path / "disk/here/step-000010")["step"] == 10


def test_a_copy_does_not_go_into_the_folder_of_a_run(hotswap, tmp_path):
    assert hotswap(*SETTINGS)[0] == 0
    Path("disk").mkdir()
    for target, out_dir in ((Path("run/checkpoints"), "other"), (Path("run"), "checkpoints")):
        link = Path("disk", out_dir)
        link.symlink_to(target.absolute())
        code, _, err = hotswap(*SETTINGS, f"out_dir={out_dir}", "train.replicate_to=disk")
        assert (code, err) == (
            1,
            f"error: train.replicate_to: disk/{out_dir} is in the folder of a run; choose another folder\n",
        )
