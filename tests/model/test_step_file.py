"""The file of a refused step: flips, cuts, a full disk, and files of other programs."""

import errno
import os

import pytest
import torch

from model.step_file import read_step, write_step
from runtime.config import UserError
from tests.test_files import DAMAGED, results_of_flips

BATCH = torch.arange(6).reshape(2, 3), torch.arange(1, 7).reshape(2, 3)
CONTENT = {"step": 12, "batches": [BATCH], "weights": {"wte.weight": torch.ones(7, 4)}}


def read_or_damaged(path):
    """Return the content as text, so that two can be compared, or DAMAGED."""
    try:
        return str(read_step(path))
    except UserError:
        return DAMAGED


def test_flips_and_cuts(tmp_path):
    """Each read gives the content that was written, or an error."""
    path = tmp_path / "nonfinite-step-000012.pt"
    write_step(path, CONTENT)
    whole = path.read_bytes()
    assert read_or_damaged(path) == str(CONTENT)
    assert str(torch.load(path, weights_only=True)) == str(CONTENT)  # other programs can read it
    assert results_of_flips(path, lambda: read_or_damaged(path)) == [DAMAGED]
    for size in (*range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_or_damaged(path) == DAMAGED


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
    write_step(path, content)
    with pytest.raises(UserError, match=r"nonfinite-step-000001.pt has no batches of a step: it is of another program"):
        read_step(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_an_odd_file_is_one_line(tmp_path, make):
    make(path := tmp_path / "nonfinite-step-000001.pt")
    with pytest.raises(UserError, match=r"nonfinite-step-000001.pt cannot be read: it is a"):
        read_step(path)


@pytest.mark.parametrize("moment", ["write", "fsync"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, moment):
    """It raises the errors that model.divergence.keep_batch() expects; no half a file stays, and no temporary one."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "nonfinite-step-000012.pt"
    path.write_bytes(b"old")
    monkeypatch.setattr(*((torch, "save") if moment == "write" else (os, "fsync")), fail)
    with pytest.raises((OSError, RuntimeError)):
        write_step(path, CONTENT)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"old")]
