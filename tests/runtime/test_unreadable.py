"""Nothing is deleted that may be good: an unreadable checkpoint ends the command, a damaged one is moved aside."""

import contextlib
import errno
import hashlib
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest

from runtime.checkpoint import checkpoint_folders, find_checkpoint, flatten, newest_valid, verify
from runtime.config import UserError
from runtime.manifest import Unreadable
from tests.runtime.test_checkpoint import facts, names, open_checkpoints, random_tensors, save

ERRORS = "EACCES", "EPERM", "EIO", "EMFILE", "ENFILE", "ESTALE", "ETIMEDOUT", "ENOMEM"
PLACES = "step-000002/manifest.json", "step-000002/model.safetensors", "step-000002/training.pt", "step-000002", "."


def contents(folder):
    """Return every path below the folder, with the bytes of the files."""
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in paths}


def break_paths(monkeypatch, path, name):
    """Let every system call that opens or lists this path fail with this error."""

    def failing(function):
        def call(where, *arguments, **options):
            if Path(os.fsdecode(where)).resolve() == path.resolve():
                raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), str(where))
            return function(where, *arguments, **options)

        return call

    for function in ("open", "listdir", "scandir"):
        monkeypatch.setattr(os, function, failing(getattr(os, function)))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ERRORS)
def test_an_unreadable_checkpoint_is_neither_skipped_nor_deleted(tmp_path, monkeypatch, capsys, place, name):
    """The newest one may be good, so no command goes on with an older one."""
    folder = tmp_path / "run/checkpoints"
    save(folder, 1, 2, losses=[2.0, 1.0])
    before = contents(tmp_path)
    break_paths(monkeypatch, folder / place, name)
    reason = os.strerror(getattr(errno, name))
    advice = "make it readable, or name another checkpoint by its path and, to resume, another out_dir"
    line = rf"^{folder / place} cannot be read: {reason}; {advice}"
    for read in (lambda: newest_valid(folder), lambda: find_checkpoint(tmp_path / "run")):
        with pytest.raises(Unreadable, match=f"{line}$"):
            read()
    if place in (".", "step-000002/manifest.json"):  # the best checkpoint, too, which a worse one would replace
        with pytest.raises(Unreadable, match=line):
            open_checkpoints(folder)
    monkeypatch.undo()
    assert contents(tmp_path) == before
    assert capsys.readouterr().err == ""
    assert newest_valid(folder).name == "step-000002"


def test_a_disk_that_fails_in_the_middle_of_a_file_makes_a_checkpoint_unreadable(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)

    def fail(file, name):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    with pytest.raises(Unreadable, match=r"step-000002/\S+ cannot be read: Input/output error; make it readable"):
        newest_valid(tmp_path)
    assert names(checkpoint_folders(tmp_path)) == ["step-000002", "step-000001"]


def test_too_many_open_files_make_a_checkpoint_unreadable(tmp_path):
    save(tmp_path, 1, 2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(Unreadable, match="cannot be read: Too many open files"):
            newest_valid(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert newest_valid(tmp_path).name == "step-000002"


@contextlib.contextmanager
def without_root():
    """Give up root's right to read every file within this context."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_without_permission_is_unreadable(place):
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's folder is for its owner alone
        folder = Path(name, "checkpoints")
        Path(name).chmod(0o755)
        save(folder, 1, 2)
        mode = (folder / place).stat().st_mode
        (folder / place).chmod(0)
        with without_root(), pytest.raises(Unreadable, match="cannot be read: Permission denied; make it readable"):
            newest_valid(folder)
        (folder / place).chmod(mode)
        with without_root():
            assert newest_valid(folder).name == "step-000002"


def test_later_checkpoints_are_moved_aside_when_a_run_resumes_before_them(tmp_path, capsys):
    """Each time under a new name. Nothing reads them again, and nothing deletes them."""
    for text in ("first", "second", "third"):
        save(tmp_path, 2, 4, 6, keep=3, losses=[3.0, 2.0, 1.0])
        (tmp_path / "step-000006/training.pt").write_text(text)
        assert newest_valid(tmp_path).name == "step-000004"
        capsys.readouterr()
        checkpoints = open_checkpoints(tmp_path, keep=1, steps_before=4)
        new = tmp_path / f"damaged-step-000006{ {'second': '-2', 'third': '-3'}.get(text, '') }"
        line = f"warning: {tmp_path}/step-000006 is damaged and is now {new}; delete it if nobody needs it\n"
        assert capsys.readouterr().err == line
        checkpoints.save(5, random_tensors(), {}, facts())
        checkpoints.save(7, random_tensors(), {}, facts())
        checkpoints.close()
        assert (new / "training.pt").read_text() == text
        assert newest_valid(tmp_path).name == "step-000007"
        for path in checkpoint_folders(tmp_path):
            shutil.rmtree(path)
    aside = sorted(path.name for path in tmp_path.glob("damaged-*"))
    assert aside == ["damaged-step-000006", "damaged-step-000006-2", "damaged-step-000006-3"]


def test_a_checkpoint_that_cannot_be_moved_aside_is_an_error_of_one_line(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)

    def fail(path, target):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "rename", fail)
    line = f"^out_dir={tmp_path.parent} cannot be written: {tmp_path.name}/step-000002: Read-only"
    with pytest.raises(UserError, match=line):
        open_checkpoints(tmp_path, steps_before=1)
    assert names(checkpoint_folders(tmp_path)) == ["step-000002", "step-000001"]


def test_a_leftover_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, capsys):
    """The run goes on. Only the save of the same step fails, because old files would mix with the new ones."""
    save(tmp_path, 1)
    (tmp_path / ".step-000002/shards").mkdir(parents=True)
    rmtree = shutil.rmtree

    def fail(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(shutil, "rmtree", fail)
    checkpoints = open_checkpoints(tmp_path, keep=5)
    line = f"warning: a killed save left {tmp_path}/.step-000002, which cannot be deleted: No space left on device\n"
    assert capsys.readouterr().err == line
    for step in (2, 3):
        checkpoints.save(step, random_tensors(step), {}, facts())
    checkpoints.close()
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path}/step-000002 could not be written: No space left")
    assert verify(newest_valid(tmp_path))["step"] == 3
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpoints = open_checkpoints(tmp_path, keep=5)
    assert not (tmp_path / ".step-000002").exists()


def test_files_of_a_killed_save_do_not_get_into_a_new_checkpoint(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    (tmp_path / ".step-000001/shards").mkdir(parents=True)
    (tmp_path / ".step-000001/shards/__0_0.distcp").touch()
    checkpoints.save(1, random_tensors(), {}, facts())
    checkpoints.close()
    assert verify(tmp_path / "step-000001")["files"].keys() == {"model.safetensors", "training.pt"}


@pytest.mark.parametrize("function", ["save_tensors", "write_manifest", "verify", "copy_folder"])
def test_a_lack_of_memory_in_the_thread_is_a_warning(tmp_path, monkeypatch, capsys, function):
    """The next save works. The last two functions make the copy of a checkpoint that is already complete."""

    def fail(*arguments):
        raise MemoryError

    folder = tmp_path / "run/checkpoints"
    checkpoints = open_checkpoints(folder, replicate_to=str(tmp_path / "disk"))
    copies = function in ("verify", "copy_folder")
    with monkeypatch.context() as patch:
        patch.setattr(f"runtime.{'checkpoint_folder' if copies else 'saver'}.{function}", fail)
        checkpoints.save(1, random_tensors(1), {}, facts())
        checkpoints.finish()
    err = capsys.readouterr().err
    what = "has no copy in" if copies else "could not be written: MemoryError"
    assert err.startswith(f"warning: {folder}/step-000001 {what}")
    assert "MemoryError" in err
    assert err.count("\n") == 1
    assert names(folder.iterdir()) == (["step-000001"] if copies else [])
    checkpoints.save(2, random_tensors(2), {}, facts())
    checkpoints.close()
    assert verify(tmp_path / "disk/run/step-000002")["step"] == 2


def test_a_lack_of_memory_before_the_first_save_is_no_error(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise MemoryError

    checkpoints, state = open_checkpoints(tmp_path), random_tensors(1)
    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", fail)
        checkpoints.allocate_host_copies({name: tensor.shape for name, tensor in flatten(state).items()})
        checkpoints.finish()
    checkpoints.save(1, state, {}, facts())
    checkpoints.close()
    assert verify(tmp_path / "step-000001")["step"] == 1
