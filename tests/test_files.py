"""A flipped bit in a file that is read back is noticed or changes nothing: never another value, never a traceback."""

import contextlib
import fcntl
import functools
import json
import os
import random
import signal
import socket

import numpy as np
import pytest
import torch

from common.files import (
    add_crc32,
    add_sha256,
    last_line,
    open_regular,
    read_bytes,
    read_json,
    read_line,
    remove_temporaries,
    write_atomically,
    write_json,
)
from data.errors import DataError
from data.loader import Windows
from data.shards import digest, open_shards
from kernels.registry import KernelError
from kernels.tuned import TABLES, read_table, write_table
from lab.proof import references
from runtime.checkpoint import read_manifest, verify
from runtime.config import UserError
from runtime.row import read_row, write_row
from tests.data.test_shards import DOCUMENTS, write_split
from tests.runtime.test_checkpoint import save

DAMAGED = "damaged"


def results_of_flips(path, read, flips=2000):
    """Flip each bit of a file alone, or `flips` random ones of more bits. Return the different results of read().

    The size and the modification time of the file stay. DAMAGED stands for an error of one line.
    """

    def write_byte(place, byte):
        with path.open("r+b") as file:  # writing the whole file would wait for the disk
            file.seek(place)
            file.write(bytes([byte]))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    good, stat, results = path.read_bytes(), path.stat(), []
    bits = range(8 * len(good))
    for bit in bits if len(bits) <= 8000 else random.Random(0).sample(bits, flips):
        place = bit // 8
        write_byte(place, good[place] ^ 1 << bit % 8)
        try:
            result = read()
        except (UserError, DataError, KernelError):
            result = DAMAGED
        if result not in results:
            results.append(result)
        write_byte(place, good[place])
    assert path.read_bytes() == good
    return results


@pytest.mark.parametrize("facts", [{}, {"a": 1}, {"b": [0.1, None, float("inf")], "sha": "é"}])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_returns_what_was_written(tmp_path, facts, indent):
    path = tmp_path / "x.json"
    write_json(path, facts, indent)
    assert read_json(path) == facts
    digest = json.loads(path.read_text()).pop("sha256")  # other programs can read the file
    assert len(digest) == 64
    assert results_of_flips(path, functools.partial(read_or_damaged, path)) == [DAMAGED]


def read_or_damaged(path):
    with contextlib.suppress(ValueError):
        return read_json(path)
    return DAMAGED


@pytest.mark.parametrize("text", ["", "{}", '{"step": 1}', "[" * 100_000, "null", '{"sha256": null}', "\0" * 100])
def test_a_file_without_its_sha256_is_damaged(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert read_or_damaged(tmp_path / "x.json") == DAMAGED


@pytest.mark.parametrize("facts", [{"step": 12, "val/loss": None, "mode": "train"}, {"name": "x", "laps": [0.5, 1.0]}])
def test_flips_in_a_line_of_figures(facts):
    """Each bit, each pair of neighbouring bits, and each byte that is missing. Other programs read the line as JSON."""
    line = add_crc32(json.dumps(facts)).encode()
    assert {key: value for key, value in json.loads(line).items() if key != "crc32"} == facts == read_line(line)
    assert read_line(json.dumps(facts).encode()) == facts  # older versions wrote no CRC-32
    number = int.from_bytes(line)
    damaged = [number ^ mask << place for place in range(8 * len(line) - 1) for mask in (1, 3)]
    lines = [value.to_bytes(len(line)) for value in damaged]
    lines += [line[:place] + line[place + 1 :] for place in range(len(line))]
    for damaged_line in lines:
        with pytest.raises((ValueError, RecursionError)):
            read_line(damaged_line)


def test_flips_in_the_row_of_a_run(tmp_path):
    """A damaged row is left out of the reports. The row of an older version has no CRC-32, and is read unchecked."""
    row = {"name": "a", "status": "ok", "train/loss": 5.125, "perf/laps_s": [0.25, 0.5], "config": {"seed": 1}}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(row, indent=1))
    assert read_row(tmp_path) == row
    write_row(tmp_path, row)
    assert json.loads(path.read_text())["perf/laps_s"] == row["perf/laps_s"]
    assert results_of_flips(path, lambda: read_row(tmp_path)) == [None]


def test_flips_in_a_checkpoint(tmp_path):
    save(tmp_path, 26, losses=[3.25])
    folder = tmp_path / "step-000026"
    assert results_of_flips(folder / "manifest.json", lambda: read_manifest(folder)) == [DAMAGED]
    for name in ("model.safetensors", "training.pt"):
        assert results_of_flips(folder / name, lambda: verify(folder), flips=1000) == [DAMAGED]


def test_a_manifest_of_another_step_is_not_valid(tmp_path):
    save(tmp_path, 26)
    folder = (tmp_path / "step-000026").rename(tmp_path / "step-000030")
    with pytest.raises(UserError, match=r"step-000030 is not a valid checkpoint: manifest.json is of step 26"):
        read_manifest(folder)
    assert read_manifest(folder.rename(tmp_path / "mine"))["step"] == 26


def test_flips_in_a_small_shard_and_in_its_index(tmp_path, capsys, monkeypatch):
    """A damaged index is written again from the tokens. A small shard is read whenever it is opened."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # 2,000 of them take 10 s
    write_split(tmp_path, "train", DOCUMENTS, eot=9)

    def read():
        shards = open_shards(tmp_path, "train", n_vocab=10)
        return [digest(shards), shards[0].tokens.tolist()]

    good = read()
    assert results_of_flips(tmp_path / "train/index.json", read) == [good]
    assert f"warning: {tmp_path}/train/index.json is damaged and is written again: " in capsys.readouterr().err
    results = results_of_flips(tmp_path / "train/000000.bin", read)
    assert results in ([good, DAMAGED], [DAMAGED, good])  # good: a flip in the zeros of the header


def test_flips_in_a_large_shard(tmp_path, monkeypatch):
    """A large shard opens without being read. `verify` finds every flip; an id beyond the vocabulary ends the run."""
    monkeypatch.setattr("data.shards.READ_TOKENS", 50)
    tokens = np.random.default_rng(0).integers(0, 40_000, 2_000).astype(np.uint16)
    write_split(tmp_path, "train", [tokens], eot=9)
    path = tmp_path / "train/000000.bin"

    def read():
        return open_shards(tmp_path, "train", 40_000, verify=True)[0].tokens.tobytes()

    def ids_are_valid():
        [x, _] = Windows(open_shards(tmp_path, "train", 40_000), 100, "training").batch(np.arange(20))
        return int(x.max()) < 40_000

    good = read()
    results = results_of_flips(path, read)
    assert results in ([good, DAMAGED], [DAMAGED, good])
    assert sorted(map(str, results_of_flips(path, ids_are_valid, flips=500))) == ["True", DAMAGED]


def test_flips_in_a_reference_of_parity(tmp_path):
    """It is made again if it is damaged, and also if the file is another program's."""
    steps = {"losses": torch.randn(20, dtype=torch.float64) / 3, "wte.weight": torch.randn(1024) / 3}
    path = tmp_path / "x.json"
    write_json(path, {name: tensor.tolist() for name, tensor in steps.items()})
    read = references.read_steps(path)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in steps.items())
    assert results_of_flips(path, lambda: references.read_steps(path)) == [None]
    torch.save([1, 2], path)
    assert references.read_steps(path) is None


def test_flips_in_a_table_of_launch_parameters(tmp_path):
    """It also holds the choices of attn=auto. The error says what to do, and nothing else is used in its place."""
    path = tmp_path / "h200.json"
    entries = {"norm_fwd 24": {"parameters": {"ROWS": 8}}, "attention causal": {"parameters": {"1024": "flash"}}}
    write_table(path, entries)
    assert read_table(path) == entries
    assert results_of_flips(path, lambda: read_table(path)) == [DAMAGED]
    write_table(tmp_path / "empty.json", {})
    assert read_table(tmp_path / "empty.json") == {}


def test_the_tables_of_the_repo_are_valid():
    tables = [*TABLES.rglob("*.json")]
    assert tables
    assert all(map(read_table, tables))


def test_the_sha256_is_of_the_rest_of_the_file():
    """Computed with sha256sum."""
    assert add_sha256('{"a": 1}') == (
        b'{"sha256": "d9c1f40fd6f4ddad6eb8610273f859cb8f4822a3c7ba3324283622d64f0e6917","a": 1}\n'
    )


def make_odd(kind, path):
    """Put something at `path` that is no regular file. Return what must be closed."""
    if kind == "a folder":
        path.mkdir()
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.relpath(path))  # an address has at most 107 bytes
        return listener
    return contextlib.nullcontext()


@pytest.mark.parametrize("kind", ["a folder", "a FIFO", "a device", "a socket"])
@pytest.mark.parametrize("mode", ["rb", "r+b", "ab"])
def test_only_a_regular_file_is_opened(tmp_path, monkeypatch, kind, mode):
    """Nothing waits, and the error names the file."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x"
    with make_odd(kind, path), pytest.raises(OSError, match=r"egular file|Is a directory") as error:
        open_regular(path, mode)
    assert str(path) in str(error.value)


def test_a_file_is_read_up_to_a_bound(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_bytes(path, 4)
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(OSError, match="it has more than 1,073,741,824 bytes"):
        read_bytes(path)


def test_the_next_write_removes_what_a_killed_one_left(tmp_path):
    """A file that is being written stays: its writer holds a lock."""
    path, process = tmp_path / "a[1].json", os.fork()
    if process == 0:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(path, b"old")
    os.waitpid(process, 0)
    [left] = tmp_path.iterdir()
    assert left.read_bytes() == b"old"
    with open_regular(left) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_temporaries(path)
        assert left.exists()
    write_atomically(path, b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a[1].json", b"new")]


def test_the_last_line_is_the_last_complete_one(tmp_path):
    """A kill may cut the last line, and a power cut may leave zeros."""
    metrics = tmp_path / "metrics.jsonl"
    assert last_line(metrics) == {}
    metrics.write_bytes(b'{"step": 1}\n{"step": 2}\n{"ste')
    assert last_line(metrics)["step"] == 2
    metrics.write_bytes(b'{"step": 1}\n' + bytes(9))
    assert last_line(metrics)["step"] == 1
    metrics.unlink()
    os.mkfifo(metrics)
    assert last_line(metrics) == {}
