"""What a program sets for its process, the peak of a job, and the commit of a figure."""

import os
import subprocess
import sys

import pytest
import torch

from runtime import device
from runtime.ranks import Ranks

NAMES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
@pytest.mark.parametrize("user", [{}, {NAMES[0]: "max_split_size_mb:64"}, {NAMES[1]: "max_split_size_mb:64"}])
def test_the_allocator_is_set_unless_the_user_has_set_it(user):
    """PyTorch uses the setting of select_device(), which a program calls before it uses a GPU.

    PyTorch shows the setting only through a private function (torch 2.11 and 2.13).
    """
    program = "import torch; from runtime.device import select_device; select_device('cpu'); "
    program += "print(torch._C._accelerator_getAllocatorSettings())"
    environment = {key: value for key, value in os.environ.items() if key not in NAMES} | user
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == next(iter(user.values()), device.ALLOCATOR)


def test_the_peak_of_a_job_is_the_largest_of_its_ranks(monkeypatch):
    """The ranks need not be alike. `mem/job_peak_gib` is their sum."""
    names = "mem/peak_allocated_gib", "mem/peak_reserved_gib", "mem/alloc_retries"
    ranks = Ranks(rank=0, world_size=2)
    monkeypatch.setattr(ranks, "gather", lambda peaks: [peaks, dict(zip(names, (3.0, 4.0, 0), strict=True))])
    monkeypatch.setattr(device, "process_peaks", lambda _: dict(zip(names, (1.0, 5.0, 2), strict=True)))
    expected = {**dict(zip(names, (3.0, 5.0, 2), strict=True)), "mem/job_peak_gib": 4.0}
    assert device.peak_memory(torch.device("cpu"), ranks) == expected


def test_the_commit_of_a_changed_tree_is_dirty(monkeypatch, tmp_path):
    """A copy of the tree without its history has no commit, also inside of another repo."""

    def git(*words):
        identity = "-c", "user.name=x", "-c", "user.email=x"
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.delenv("HOTSWAP_COMMIT", raising=False)
    (tmp_path / "copy").mkdir()
    (tmp_path / "file").write_text("1")
    git("init", "--quiet")
    git("add", "file")
    git("commit", "--quiet", "--message", "1")
    monkeypatch.setattr(device, "ROOT", tmp_path)
    assert device.git_commit() == {"git_commit": git("rev-parse", "HEAD")}
    (tmp_path / "file").write_text("22")
    assert device.git_commit() == {"git_commit": git("rev-parse", "HEAD") + "-dirty"}
    monkeypatch.setattr(device, "ROOT", tmp_path / "copy")
    assert device.git_commit()["git_commit"] is None


def test_a_row_says_why_its_commit_is_unknown(monkeypatch, tmp_path):
    def missing():
        row = device.environment(torch.device("cpu"))
        assert row["git_commit"] is None
        return row["git_commit_missing"]

    monkeypatch.delenv("HOTSWAP_COMMIT", raising=False)
    monkeypatch.setattr(device, "ROOT", tmp_path)
    assert missing() == "the repo's folder has no .git: HOTSWAP_COMMIT=SHA names the commit of a copy"
    (tmp_path / ".git").write_text("damaged")
    assert missing().startswith("git failed: fatal: ")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", time_out)
        assert missing().endswith("timed out after 10 seconds")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing() == "git failed: [Errno 2] No such file or directory: 'git'"
    monkeypatch.setenv("HOTSWAP_COMMIT", "abc")
    row = device.environment(torch.device("cpu"))
    assert row["git_commit"] == "abc"
    assert "git_commit_missing" not in row


def time_out(command, **options):
    raise subprocess.TimeoutExpired(command, options["timeout"])


def test_the_peak_of_another_library_is_added(monkeypatch):
    counts = {"max_memory_allocated": 2, "max_memory_reserved": 3}
    for name, gib in counts.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, gib=gib: gib * device.GIB)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {})
    monkeypatch.setattr(device, "OTHER_PEAKS", {"XLA": lambda gpu: 5 * device.GIB if gpu.index == 1 else 0})
    peaks = device.process_peaks(torch.device("cuda:1"))
    assert (peaks["mem/peak_allocated_gib"], peaks["mem/peak_reserved_gib"]) == (7.0, 8.0)
    assert device.process_peaks(torch.device("cuda:0"))["mem/peak_allocated_gib"] == 2.0


def test_a_full_memory_of_xla_is_one_line():
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.\nBufferAssignment: ..."
    lower = r"^out of memory with T=8: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes; lower T$"
    with pytest.raises(device.OutOfMemory, match=lower), device.explain_out_of_memory("T=8", "T"):
        raise RuntimeError(text)  # JaxRuntimeError is one
    with pytest.raises(RuntimeError, match="INTERNAL"), device.explain_out_of_memory("T=8", "T"):
        raise RuntimeError("INTERNAL: no")
