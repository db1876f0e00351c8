"""Checkpoints: a load returns what was saved, and an incomplete or damaged checkpoint is never used."""

import errno
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import checkpoint, checkpoint_folder, saver
from runtime.checkpoint import (
    checkpoint_folders,
    find_checkpoint,
    flatten,
    load_state,
    newest_valid,
    read_weights,
    save_tensors,
    verify,
)
from runtime.config import UserError
from runtime.manifest import read_manifest, write_manifest
from runtime.ranks import Ranks
from runtime.saver import Checkpoints

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def test_the_checkpoint_to_keep_has_the_lowest_loss_or_is_the_newest(tmp_path, capsys):
    """Damaged ones are skipped with a warning."""
    folder = tmp_path / "checkpoints"
    assert checkpoint_folder.best_or_newest(folder) is None
    save(folder, 10, 20, keep=9)
    path, manifest = checkpoint_folder.best_or_newest(folder)
    assert (path.name, manifest["step"]) == ("step-000020", 20)
    save(folder, 30, 40, 50, 60, keep=9, losses=[2.5, 1.5, math.nan, 3.0])
    assert checkpoint_folder.best_or_newest(folder)[0].name == "step-000040"
    (folder / "step-000040/training.pt").write_bytes(b"damaged")
    assert checkpoint_folder.best_or_newest(folder)[0].name == "step-000030"
    (folder / "step-000030/manifest.json").write_bytes(b"damaged")
    assert checkpoint_folder.best_or_newest(folder)[0].name == "step-000060"
    err = capsys.readouterr().err
    assert "step-000040 is damaged: training.pt" in err
    assert "step-000030 is not a valid checkpoint" in err


def random_tensors(seed=0):
    """A State, which differs for each seed."""
    generator = torch.Generator().manual_seed(seed)
    groups = ("model", "exp_avg", "exp_avg_sq")
    return {group: {name: torch.randn(1000, 3, generator=generator) for name in ("a", "b.c")} for group in groups}


def open_checkpoints(folder, keep=2, steps_before=10**6, replicate_to=None):
    """The Checkpoints of a run that resumes after `steps_before` steps. By default no checkpoint is later than that."""
    return Checkpoints(folder, keep, False, Ranks(), CPU, steps_before, replicate_to)


def facts(loss=None):
    """The facts of a manifest."""
    held = {"val_loss": loss, "elapsed": 1.5, "config": {}, "data": {}, "metrics_lines": 0, "figures": {}}
    return {**held, "pauses": {"last_ms": 1.0, "median_ms": 1.0}}


def save(folder, *steps, keep=2, losses=None):
    """Save a checkpoint in each of these steps, in one process. `losses` are their validation losses."""
    checkpoints = open_checkpoints(folder, keep)
    for step, loss in zip(steps, losses or [None] * len(steps), strict=True):
        checkpoints.save(step, random_tensors(step), {"updates": step, "random": []}, facts(loss))
    checkpoints.close()
    return checkpoints


def names(folders):
    return [folder.name for folder in folders]


def test_save_uses_the_host_memory_that_was_allocated_before(tmp_path):
    checkpoints, state = open_checkpoints(tmp_path), random_tensors(7)
    checkpoints.allocate_host_copies({name: tensor.shape for name, tensor in flatten(state).items()})
    checkpoints.finish()
    addresses = {key: tensor.data_ptr() for key, tensor in checkpoints.host_copies.items()}
    checkpoints.save(7, state, {}, facts())
    checkpoints.close()
    assert {key: tensor.data_ptr() for key, tensor in checkpoints.host_copies.items()} == addresses
    assert set(addresses) == {f"{group}.{name}" for group in state for name in state[group]}
    assert torch.equal(checkpoints.host_copies["exp_avg.b.c"], state["exp_avg"]["b.c"])


def test_the_newest_checkpoint_has_a_verified_copy_elsewhere(tmp_path, capsys, monkeypatch):
    """A copy that cannot be made, or that is damaged, is a warning, and the older copy stays."""
    folder, disk = tmp_path / "run/checkpoints", tmp_path / "disk"
    checkpoints = Checkpoints(folder, 1, False, Ranks(), CPU, replicate_to=str(disk))
    for step in (1, 2):
        checkpoints.save(step, random_tensors(step), {"updates": step, "random": []}, facts())
    checkpoints.finish()
    assert names((disk / "run").iterdir()) == ["step-000002"]
    assert verify(disk / "run/step-000002") == verify(folder / "step-000002")
    assert find_checkpoint(disk / "run") == disk / "run/step-000002"
    copied = []

    def fill_the_disk(source, target):
        copied.append(copyfile(source, target))
        if len(copied) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    copyfile = shutil.copyfile
    monkeypatch.setattr("runtime.checkpoint_folder.shutil.copyfile", fill_the_disk)
    (disk / "run/.step-000001").symlink_to("nowhere")  # what a killed copy left
    checkpoints.save(3, random_tensors(3), {"updates": 3}, facts())
    checkpoints.finish()
    warning = f"warning: {folder}/step-000003 has no copy in {disk}/run: No space left on device\n"
    assert (capsys.readouterr().err, len(copied)) == (warning, 2)
    assert verify(folder / "step-000003")["step"] == 3
    assert names((disk / "run").iterdir()) == ["step-000002"]  # nothing else takes the room of the next copy

    def copy_without_bytes(source, target):
        if source.name == "training.pt":
            target.write_bytes(b"")
        else:
            copyfile(source, target)

    monkeypatch.setattr("runtime.checkpoint_folder.shutil.copyfile", copy_without_bytes)
    checkpoints.save(4, random_tensors(4), {"updates": 4}, facts())
    checkpoints.close()
    assert f"step-000004 has no copy in {disk}/run: {disk}/run/.step-000004 is damaged" in capsys.readouterr().err
    assert find_checkpoint(disk / "run") == disk / "run/step-000002"


@pytest.mark.parametrize("left", ["nothing", "the copy before", "a copy of another run"])
def test_a_resumed_run_makes_the_copy_that_a_killed_one_has_not(tmp_path, monkeypatch, left):
    folder, disk = tmp_path / "run/checkpoints", tmp_path / "disk"
    save(folder, 1, 2)
    if left != "nothing":
        shutil.copytree(folder / "step-000001", disk / "run/step-000001")
    if left == "a copy of another run":
        save(tmp_path / "other", 2, losses=[7.0])
        shutil.copytree(tmp_path / "other/step-000002", disk / "run/step-000002")
    for _ in range(2):
        with Checkpoints(folder, 1, False, Ranks(), CPU, steps_before=2, replicate_to=str(disk)):
            pass
        assert names((disk / "run").iterdir()) == ["step-000002"]
        assert verify(disk / "run/step-000002") == verify(folder / "step-000002")
        monkeypatch.setattr(checkpoint_folder, "copy_folder", pytest.fail)  # the second time it is there


def test_a_dead_disk_for_the_copy_is_a_warning(tmp_path, monkeypatch, capsys):
    folder, disk = tmp_path / "run/checkpoints", tmp_path / "disk"
    save(folder, 1)
    read = checkpoint_folder.read_bytes

    def fail(path):
        if path.is_relative_to(disk):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path)

    monkeypatch.setattr(checkpoint_folder, "read_bytes", fail)
    with Checkpoints(folder, 1, False, Ranks(), CPU, steps_before=1, replicate_to=str(disk)):
        pass
    assert capsys.readouterr().err == f"warning: {folder}/step-000001 has no copy in {disk}/run: Stale file handle\n"


def test_the_best_checkpoint_is_found_again_and_nothing_else_is_deleted(tmp_path, capsys):
    """A kill between the rename of a checkpoint and the link; a damaged checkpoint that was the best one."""
    save(tmp_path, 2, 4, 6, keep=3, losses=[1.5, 2.0, 1.0])
    link = tmp_path / "best"
    link.unlink()
    link.symlink_to("step-000004")
    assert open_checkpoints(tmp_path, keep=1).best == 1.0
    assert link.readlink().name == "step-000006"
    assert open_checkpoints(tmp_path, keep=1, steps_before=4).best == 1.5
    assert link.readlink().name == "step-000002"
    assert names(checkpoint_folders(tmp_path)) == ["step-000004", "step-000002"]
    capsys.readouterr()


def test_a_save_that_failed_is_not_the_best_one(tmp_path, monkeypatch, capsys):
    def fail(folder, facts):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = open_checkpoints(tmp_path, keep=5)
    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_manifest", fail)
        checkpoints.save(1, random_tensors(), {}, facts(1.0))
        checkpoints.finish()
    checkpoints.save(2, random_tensors(), {}, facts(2.0))
    checkpoints.close()
    assert (tmp_path / "best").readlink().name == "step-000002"
    assert "step-000001 could not be written" in capsys.readouterr().err


def test_files_are_on_the_disk_before_a_checkpoint_gets_its_name(tmp_path, disk):
    """So are metrics.jsonl and the copy. The new name is on the disk before anything older is deleted."""
    run, copy = tmp_path / "run", tmp_path / "disk/run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    checkpoints = Checkpoints(run / "checkpoints", 1, False, Ranks(), CPU, replicate_to=str(tmp_path / "disk"))
    checkpoints.save(1, random_tensors(), {}, facts())
    checkpoints.close()
    for folder, other in ((run / "checkpoints", run / "metrics.jsonl"), (copy, copy / ".step-000001/manifest.json")):
        hidden, final = folder / ".step-000001", folder / "step-000001"
        renamed = disk.index((str(hidden), str(final)))
        files = hidden, hidden / "model.safetensors", hidden / "training.pt", other
        assert set(map(str, files)) <= set(disk[:renamed])
        assert disk[renamed + 1] == str(folder)


def test_shards_are_on_the_disk_before_the_manifest(tmp_path, disk):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/rank0").touch()
    write_manifest(tmp_path, facts())
    *synced, manifest, renamed, folder = disk
    assert synced == [str(tmp_path / "shards/rank0"), str(tmp_path / "shards")]
    assert (renamed, folder) == ((manifest, str(tmp_path / "manifest.json")), str(tmp_path))


def test_load_returns_what_was_saved(tmp_path):
    save(tmp_path, 7)
    folder = find_checkpoint(tmp_path)
    assert folder == tmp_path / "step-000007"
    assert verify(folder)["step"] == 7
    state = random_tensors(seed=0)
    assert load_state(folder, state) == {"updates": 7, "random": []}
    for group, tensors in random_tensors(7).items():
        for name, tensor in tensors.items():
            assert torch.equal(state[group][name], tensor)
    assert all(torch.equal(tensor, random_tensors(7)["model"][name]) for name, tensor in read_weights(folder).items())


def test_a_file_of_tensors_has_the_mode_of_other_new_files(tmp_path):
    save_tensors({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "other").touch()
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_checkpoint_is_unchanged_when_the_tensors_change_before_it_is_written(tmp_path):
    """save() copies the tensors. Here the thread cannot write before they have changed. The next save waits for it."""
    checkpoints, state = open_checkpoints(tmp_path), random_tensors(1)
    changed = threading.Event()
    checkpoints.thread.submit(changed.wait)
    checkpoints.save(1, state, {}, facts())
    for tensors in state.values():
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
    assert checkpoint_folders(tmp_path) == []
    changed.set()
    checkpoints.save(2, random_tensors(2), {}, facts())
    assert (tmp_path / "step-000001").exists()
    checkpoints.close()
    for step in (1, 2):
        weights = read_weights(tmp_path / f"step-00000{step}")
        assert torch.equal(weights["a"], random_tensors(step)["model"]["a"])


def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path):
    save(tmp_path, 10, 20, 30, 40, 50, losses=[3.0, 1.0, 2.0, None, 1.0])
    assert names(checkpoint_folders(tmp_path)) == ["step-000050", "step-000040", "step-000020"]
    assert (tmp_path / "best").resolve() == tmp_path / "step-000020"
    assert open_checkpoints(tmp_path).best == 1.0  # the next process reads it from the manifest
    save(tmp_path, 60, losses=[0.5])
    assert (tmp_path / "best").resolve() == tmp_path / "step-000060"
    assert names(checkpoint_folders(tmp_path)) == ["step-000060", "step-000050"]


def test_step_1000000_is_newer_than_step_999999(tmp_path):
    """Its name comes first in the alphabet."""
    save(tmp_path, 999_998, 999_999, 1_000_000)
    assert names(checkpoint_folders(tmp_path)) == ["step-1000000", "step-999999"]
    assert newest_valid(tmp_path).name == "step-1000000"


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, capsys, name, damage):
    save(tmp_path, 1, 2)
    path = tmp_path / "step-000002" / name
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        problem = "has another SHA-256"
    elif damage == "truncated":
        path.write_bytes(content[:-1])
        problem = f"has {len(content) - 1} of {len(content)} bytes"
    else:
        path.unlink()
        problem = "is missing"
    with pytest.raises(UserError, match=f"step-000002 is damaged: {name} {problem}"):
        verify(tmp_path / "step-000002")
    assert newest_valid(tmp_path) == tmp_path / "step-000001"
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path}/step-000002 is damaged: {name} ")


def test_an_invalid_manifest_is_an_error(tmp_path):
    save(tmp_path, 1)
    path = tmp_path / "step-000001" / "manifest.json"
    valid = json.loads(path.read_text())
    for text in ("", "[", "[]", "{}", '{"version": 1}', json.dumps(valid | {"version": 2}), "\0" * 100):
        path.write_text(text)
        with pytest.raises(UserError):
            read_manifest(path.parent)
    with pytest.raises(UserError, match="holds no valid checkpoint"):
        find_checkpoint(tmp_path / "nowhere")


def test_a_renamed_checkpoint_is_not_valid(tmp_path):
    """Its step would decide what resumes, and what is deleted. The link `best` may lead to it."""
    save(tmp_path, 1, losses=[1.0])
    (tmp_path / "step-000001").rename(tmp_path / "step-000002")
    with pytest.raises(UserError, match=r"step-000002 is not a valid checkpoint: manifest.json is of step 1"):
        read_manifest(tmp_path / "step-000002")


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "step-000002" / "training.pt").write_bytes(b"")
    save(tmp_path, 2)
    assert newest_valid(tmp_path) == tmp_path / "step-000002"


def test_later_checkpoints_are_moved_aside_when_the_run_resumes_before_them(tmp_path):
    """Otherwise the damaged one would count as the newest, and the new ones would be deleted as old."""
    save(tmp_path, 2, 4, 6, keep=1, losses=[3.0, 2.0, 1.0])
    (tmp_path / "step-000006" / "training.pt").write_bytes(b"")
    checkpoints = open_checkpoints(tmp_path, keep=1, steps_before=4)
    # Step 4 was deleted when step 6 was saved, and step 6 was the best
    assert (checkpoint_folders(tmp_path), checkpoints.best) == ([], math.inf)
    checkpoints.save(5, random_tensors(), {}, facts(2.5))
    checkpoints.close()
    assert newest_valid(tmp_path) == tmp_path / "step-000005"
    assert checkpoints.best == 2.5


def test_the_checkpoint_that_a_run_resumes_from_stays(tmp_path):
    save(tmp_path, 1, 2, 3, keep=3)
    open_checkpoints(tmp_path, keep=3, steps_before=2)
    assert names(checkpoint_folders(tmp_path)) == ["step-000002", "step-000001"]


def test_a_damaged_best_checkpoint_does_not_count(tmp_path, capsys):
    """Instead, the newest one is the best one."""
    save(tmp_path, 1, 2, 3, keep=1, losses=[1.0, 2.0, 2.0])
    (tmp_path / "best" / "manifest.json").write_text("")
    assert open_checkpoints(tmp_path).best == 2.0
    assert (tmp_path / "best").readlink().name == "step-000003"
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path}/step-000001 is not a valid checkpoint")


def test_a_backup_beside_the_checkpoints_is_ignored(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000001.bak")
    assert names(checkpoint_folders(tmp_path)) == ["step-000001"]


@pytest.mark.parametrize("kind", ["a link to a folder", "a link to nowhere", "a link to itself", "a file"])
@pytest.mark.parametrize("name", ["step-000004", ".step-000003", "best"])
def test_a_link_or_a_file_in_the_place_of_a_checkpoint_is_passed_over(tmp_path, capsys, name, kind):
    """It is never read and never counts. A save may replace it, but not what the link leads to."""
    folder, other = tmp_path / "run", tmp_path / "other"
    save(folder, 1, 2, losses=[1.0, 2.0])
    save(other, 4, losses=[0.1])
    path = folder / name
    path.unlink(missing_ok=True)  # best
    if kind == "a file":
        path.write_text("x")
    else:
        path.symlink_to({"a link to a folder": other / "step-000004", "a link to itself": name}.get(kind, "nowhere"))
    assert newest_valid(folder).name == "step-000002"
    warning = (
        f"warning: {path} is a link or a file and not a checkpoint; it is skipped\n" if name == "step-000004" else ""
    )
    assert capsys.readouterr().err == warning
    checkpoints = open_checkpoints(folder, steps_before=2)
    for step, loss in ((3, 3.0), (4, 2.5)):
        checkpoints.save(step, random_tensors(step), {}, facts(loss))
    checkpoints.close()
    assert verify(newest_valid(folder))["step"] == 4
    assert verify(other / "step-000004")["val_loss"] == 0.1


def test_a_copy_of_the_folder_can_save_when_best_became_a_folder(tmp_path):
    """A copy that follows links turns the link `best` into a folder."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    save(original, 1, losses=[1.0])
    shutil.copytree(original, copy, symlinks=False)
    save(copy, 2, losses=[0.5])
    assert (copy / "best").resolve() == copy / "step-000002"


@pytest.mark.parametrize("full", ["model.safetensors", "training.pt"])
def test_earlier_checkpoints_stay_when_the_disk_is_full(tmp_path, capsys, full):
    """During the second save a file cannot have all of its bytes, as on a full disk. Then there is space again."""
    save(tmp_path, 1)
    size = (tmp_path / "step-000001" / full).stat().st_size
    assert (size > (tmp_path / "step-000001/model.safetensors").stat().st_size) == (full == "training.pt")
    checkpoints = open_checkpoints(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
    try:
        checkpoints.save(2, random_tensors(2), {"random": torch.zeros(2**16)}, facts())  # more than a buffer holds
        checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {tmp_path}/step-000002 could not be written: ")
    assert "File too large" in warning
    assert warning.endswith("; earlier checkpoints stay\n")
    assert warning.count("\n") == 1
    assert names(tmp_path.iterdir()) == ["step-000001"]
    assert verify(tmp_path / "step-000001")["step"] == 1
    checkpoints.save(3, random_tensors(3), {}, facts())
    checkpoints.close()
    assert verify(tmp_path / "step-000003")["step"] == 3


def test_close_raises_when_the_last_save_failed(tmp_path):
    checkpoints = open_checkpoints(tmp_path / "file" / "checkpoints")
    (tmp_path / "file").write_text("a file where a folder must be")
    checkpoints.save(1, random_tensors(), {}, facts())
    with pytest.raises(UserError, match="step-000001 could not be written: Not a directory"):
        checkpoints.close()


# For n = 0, 1, 2, ... copy the folder, and let a child process save step 3. The child kills itself before its n-th file
# operation. The loop ends when a child has completed its save, and prints how many children were killed.
KILLED_SAVES = """
import os, shutil, signal, sys
from pathlib import Path
from tests.runtime.test_checkpoint import facts, open_checkpoints, random_tensors

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}
saved, copies, n = Path(sys.argv[1]), Path(sys.argv[2]), 0

def save_and_kill(folder, n):
    checkpoints, operations = open_checkpoints(folder), 0

    def kill(event, arguments):  # Python calls this before each operation, also in the thread that writes
        nonlocal operations
        if event in OPERATIONS:
            operations += 1
            if operations > n:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    checkpoints.save(3, random_tensors(3), {}, facts(1.0))
    checkpoints.close()
    os._exit(0)

while True:
    folder = shutil.copytree(saved, copies / str(n), symlinks=True)
    child = os.fork()
    if child == 0:
        save_and_kill(folder, n)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    n += 1
print(n)
"""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_all_checkpoints_are_complete_when_a_save_is_killed(tmp_path):
    """Killed before each file operation of a save, the run has only complete checkpoints, and never fewer than two."""
    saved, copies = tmp_path / "saved", tmp_path / "copies"
    copies.mkdir()
    save(saved, 1, 2, losses=[3.0, 2.0])
    command = [sys.executable, "-c", KILLED_SAVES, saved, copies]
    kills = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    newest, incomplete = [], []
    for n in range(kills):
        folder = copies / str(n)
        assert len(checkpoint_folders(folder)) >= 2
        assert all(verify(path) for path in checkpoint_folders(folder))
        verify(folder / "best")
        newest.append(newest_valid(folder).name)
        incomplete += folder.glob(".step-*")
        open_checkpoints(folder)
        assert not any(folder.glob(".step-*"))
    assert len(incomplete) > 5  # kills before the checkpoint was renamed
    assert newest == sorted(newest)
    assert set(newest) == {"step-000002", "step-000003"}


def test_random_numbers_repeat_when_the_random_state_is_restored():
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]

    saved = checkpoint.random_state(CPU)
    expected = draw()
    assert draw() != expected
    checkpoint.restore_random_state(saved, CPU)
    assert draw() == expected


def test_a_random_state_loads_with_weights_only(tmp_path):
    torch.save(checkpoint.random_state(CPU), tmp_path / "x.pt")
    checkpoint.restore_random_state(torch.load(tmp_path / "x.pt", weights_only=True), CPU)
