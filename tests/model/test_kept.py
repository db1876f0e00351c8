"""The file of a refused step: flips, cuts, a full disk, and files of older versions and of other programs."""

import errno
import os

import pytest
import torch

from model import kept
from model.kept import read_kept, write_kept
from runtime.config import UserError
from tests.test_files import DAMAGED, results_of_flips

BATCH = torch.arange(6).reshape(2, 3), torch.arange(1, 7).reshape(2, 3)
CONTENT = {"step": 12, "batches": [BATCH], "weights": {"wte.weight": torch.ones(7, 4)}}


def read_or_damaged(path):
    """Return the content as text, so that two can be compared, or DAMAGED."""
    try:
        return str(read_kept(path))
    except UserError:
        return DAMAGED


def test_flips_and_cuts_in_a_kept_step(tmp_path, capsys):
    """Each read gives the content that was written, or an error.

    A flip in the mark before the SHA-256 makes the file one of an older version, with a warning; its content is whole.
    """
    path = tmp_path / "nonfinite-step-000012.pt"
    write_kept(path, CONTENT)
    whole = path.read_bytes()
    assert read_or_damaged(path) == str(CONTENT)
    assert str(torch.load(path, weights_only=True)) == str(CONTENT)  # other programs can read it
    assert capsys.readouterr().err == ""
    assert set(results_of_flips(path, lambda: read_or_damaged(path))) <= {DAMAGED, str(CONTENT)}
    assert "has no SHA-256, because an older hotswap wrote it" in capsys.readouterr().err
    for size in (*range(0, len(whole), 97), len(whole) - kept.LINE_BYTES - 1):
        path.write_bytes(whole[:size])
        assert read_or_damaged(path) in (DAMAGED, str(CONTENT))


def test_flips_in_the_file_of_an_older_version_are_one_line_or_read(tmp_path):
    path = tmp_path / "nonfinite-step-000012.pt"
    torch.save(CONTENT, path)
    assert read_or_damaged(path) == str(CONTENT)
    assert DAMAGED in results_of_flips(path, lambda: read_or_damaged(path))


@pytest.mark.parametrize(
    "content",
    [
        3,
        {},
        {"step": 1, "batches": []},
        {"step": 1, "batches": [BATCH[:1]]},
        {"step": 1, "batches": [(BATCH[0], BATCH[1].float())]},
        {"step": 1, "batches": [(BATCH[0], BATCH[1][:1])]},
        {"step": 1, "batches": [BATCH], "weights": 3},
        {"step": 1, "batches": [BATCH], "weights": {"wte.weight": 3}},
        {"step": "1", "batches": [BATCH]},
        {"step": 1, "batches": [(BATCH[0][:, :1].expand(2, 10**9),) * 2]},
        {"step": 1, "batches": [BATCH], "weights": {"wte.weight": torch.ones(1).expand(10**9)}},
    ],
)
def test_a_file_of_another_program_is_one_line(tmp_path, content):
    path = tmp_path / "nonfinite-step-000001.pt"
    write_kept(path, content)
    with pytest.raises(UserError, match=r"nonfinite-step-000001.pt has no batches of a step: it is of another program"):
        read_kept(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_an_odd_file_is_one_line(tmp_path, make):
    make(path := tmp_path / "nonfinite-step-000001.pt")
    with pytest.raises(UserError, match=r"nonfinite-step-000001.pt cannot be read: it is a"):
        read_kept(path)


@pytest.mark.parametrize("moment", ["write", "fsync"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, moment):
    """It raises the errors that model.divergence.keep_batch() expects; no half a file stays, and no temporary one."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "nonfinite-step-000012.pt"
    path.write_bytes(b"old")
    monkeypatch.setattr(*((kept.Digested, "write") if moment == "write" else (os, "fsync")), fail)
    with pytest.raises((OSError, RuntimeError)):
        write_kept(path, CONTENT)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"old")]
