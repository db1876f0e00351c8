"""Rows in .jsonl files: a full disk leaves no half line, and a damaged line is named."""

import errno
import json
import os
import resource

import pytest

from lab import rows
from lab.report import readmes
from runtime.config import UserError


def test_a_full_disk_adds_no_half_line(tmp_path):
    """The next row would continue it, and both would be lost."""
    path, limits = tmp_path / "train.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    rows.append_rows(path, [{"step": 1}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(UserError, match=f"{path} cannot be written: No space left on device"):
            rows.append_rows(path, [{"step": 2}, {"step": 3}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    rows.append_rows(path, [{"step": 4}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 4}]


def test_a_damaged_line_in_results_is_named(tmp_path, monkeypatch):
    """A README must not lose a row silently."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    path = rows.append_rows(tmp_path / "h200/train.jsonl", [{"name": "a"}, {"name": "b"}])
    assert rows.read_rows("h200") == [{"name": "a"}, {"name": "b"}]
    path.write_text(path.read_text().replace("}\n{", "\n{"))
    with pytest.raises(UserError, match=f"{path}: line 1 is damaged; restore the file: git checkout "):
        rows.read_rows("h200")


def test_a_full_disk_leaves_the_readme(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text(text := "<!-- ops: none -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(readmes, "ROOT", tmp_path)

    def fail(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*README\.md"):
        list(readmes.write_readmes())
    assert (tmp_path / "README.md").read_text() == text
