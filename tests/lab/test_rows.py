"""Rows in .jsonl files: a full disk leaves no half line, and a damaged line is named."""

import errno
import json
import os
import resource

import pytest

from common.files import add_crc32
from lab import rows
from lab.report import readmes
from runtime.config import UserError
from scripts import collect


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
    assert rows.read_whole(path) == [{"step": 1}, {"step": 4}]


def test_a_damaged_line_in_results_is_named(tmp_path, monkeypatch):
    """A README must not lose a row silently."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    path = rows.append_rows(tmp_path / "h200/train.jsonl", [{"name": "a"}, {"name": "b"}])
    assert rows.read_rows("h200") == [{"name": "a"}, {"name": "b"}]
    path.write_text(path.read_text().replace("}\n{", "\n{"))
    with pytest.raises(UserError, match=rf"{path}: line 1 is damaged \(.*\); restore the file: git checkout "):
        rows.read_rows("h200")


def test_flips_in_a_file_of_results(results):
    """Each bit, each missing byte, and each cut inside a line."""
    kept = [{"name": "a", "perf/laps_s": [0.25, None], "env": {"git_commit": "deadbeef"}}, {"commit": "deadbee"}]
    path = rows.append_rows(results / "h200/train.jsonl", kept)
    assert rows.read_rows("h200") == kept
    content = path.read_bytes()
    number, ends = int.from_bytes(content), [content.index(b"\n"), len(content)]
    damaged = [(number ^ 1 << bit).to_bytes(len(content)) for bit in range(8 * len(content))]
    damaged += [content[:place] + content[place + 1 :] for place in range(len(content) - 1)]
    damaged += [content[:place] for place in range(1, len(content) - 1) if place not in (ends[0], ends[0] + 1)]
    for text in damaged:
        path.write_bytes(text)
        with pytest.raises(UserError, match=r": line [12] (is damaged|has no CRC-32)"):
            rows.read_rows("h200")


def test_a_row_without_a_crc32_is_an_error_in_results_only(results, tmp_path, monkeypatch, called):
    """Older versions wrote none. A person who writes or merges a row adds it with scripts.collect."""
    row = {"system": "nanoGPT", "tokens_per_sec": float("nan")}
    path = rows.append_rows(results / "h200/peers.jsonl", [{"system": "a"}])
    first = path.read_text()
    for file in (path, tmp_path / "peers.jsonl"):
        with file.open("a") as lines:
            print(json.dumps(row), file=lines)
    assert rows.read_whole(tmp_path / "peers.jsonl") == [row | {"tokens_per_sec": None}]
    add = f"python -m scripts.collect {path}"
    with pytest.raises(UserError, match=f"peers.jsonl: line 2 has no CRC-32; if the line is right, add it: {add}$"):
        rows.read_rows("h200", "peers")
    assert called("collect.py", collect.main, str(path)) == (0, f"{path}: each row has its CRC-32\n", "")
    assert path.read_text() == f"{first}{add_crc32(json.dumps(row))}\n"
    assert rows.read_rows("h200", "peers")[1] == row | {"tokens_per_sec": None}
    path.write_text(damaged := path.read_text().replace("nanoGPT", "nanoGPU"))
    code, _, err = called("collect.py", collect.main, str(path))
    assert (code, err.count("\n"), path.read_text()) == (1, 1, damaged)
    assert err.startswith(f"error: {path}: line 2 is damaged (its CRC-32 is wrong)")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_an_odd_file_in_the_place_of_rows_is_one_line(tmp_path, make):
    make(path := tmp_path / "rows.jsonl")
    for use in (rows.read_jsonl, rows.add_checksums, lambda path: rows.append_rows(path, [{}])):
        with pytest.raises(UserError, match=r"rows.jsonl cannot be (read|written): (it is|Is) a"):
            use(path)


def test_every_row_of_this_repo_has_its_crc32():
    paths = [*rows.RESULTS.rglob("*.jsonl")]
    assert len(paths) > 10
    assert all(rows.read_whole(path) for path in paths)


def test_a_full_disk_leaves_the_readme(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text(text := "<!-- ops: none -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(readmes, "ROOT", tmp_path)

    def fail(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*README\.md"):
        list(readmes.write_readmes())
    assert (tmp_path / "README.md").read_text() == text
