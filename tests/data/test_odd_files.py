"""What is no regular file, too large for the memory, or changes while it is read: one line, and no hang."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import data.corpus
from data import open_dataset
from data.corpus import text_source
from data.errors import BadText, DataError
from data.pipeline import write_shards
from data.tokenizer import Bytes
from tests.data.test_corpus import texts_of, write_parquet
from tests.data.test_dataset import data_config, write_nanogpt_files
from tests.data.test_loader import T, windows  # noqa: F401 (a fixture)
from tests.data.test_pipeline import ROOT, Numbered, shard_bytes
from tests.test_files import make_odd

CPU = torch.device("cpu")
KINDS = ["a folder", "a FIFO", "a device", "a socket"]
TEXTS = ["a.txt", "a.md", "a.py", "a.jsonl", "a.jsonl.gz", "a.parquet"]


def one_line(function, *arguments, **options):
    """Return the message of the DataError that the function raises."""
    with pytest.raises(DataError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The config of a text file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text " * 100)
    return data_config(tmp_path, path="text.txt")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_must_be_a_regular_file(tmp_path, monkeypatch, kind, name):
    """A folder may have any name. In a folder, what is no regular file is left out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.txt").write_text("text")
    with make_odd(kind, tmp_path / name):
        expected = "no file in it ends with" if kind == "a folder" else f"{name} cannot be read: it is {kind}, and must"
        for path in (name, ["b.txt", name], name.replace("a.", "[a].")):
            assert expected in one_line(text_source, path)
        assert text_source(str(tmp_path)).files == [tmp_path / "b.txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_of_a_data_set_must_be_a_regular_file(config, tmp_path, kind):
    """Of the shards, of their preparation, and of nanoGPT. Nothing else is deleted."""
    split = open_dataset(config).train[0].path.parent
    folder = split.parent
    for path in (split / "index.json", split / "000000.bin"):
        path.rename(tmp_path / "kept")
        with make_odd(kind, path):
            assert f"{path} cannot be read: it is {kind}, and must be a regular file" == one_line(open_dataset, config)
        path.rmdir() if kind == "a folder" else path.unlink()
        (tmp_path / "kept").rename(path)
    assert open_dataset(config)
    folder.rename(tmp_path / "kept")
    unfinished = folder.with_name(f"{folder.name}.partial")
    path = unfinished / "progress.json"
    unfinished.mkdir()
    with make_odd(kind, path):
        line = one_line(open_dataset, config)
        assert f"it is {kind}, and must be a regular file" in line
        assert str(path) in line
    path.rmdir() if kind == "a folder" else path.unlink()
    unfinished.rmdir()
    for path in (folder, unfinished):
        if kind != "a folder":
            with make_odd(kind, path):
                assert one_line(open_dataset, config).endswith(f": Not a directory ({path})")
            path.unlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.pkl"])
def test_each_file_of_nanogpt_must_be_a_regular_file(tmp_path, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)
    folder = write_nanogpt_files(tmp_path / "a")
    (folder / name).unlink(missing_ok=True)
    with make_odd(kind, folder / name):
        line = one_line(open_dataset, data_config(tmp_path, "nanogpt", path=str(folder)))
    assert ("the folder has a meta.pkl" if name == "meta.pkl" else f"{name} cannot be read: it is {kind}") in line


def test_a_shard_that_cannot_be_read_is_not_called_bad(config, monkeypatch):
    """Nobody should delete it. mmap() fails with ENOMEM if the memory is full."""
    path = open_dataset(config).train[0].path

    def fail(*arguments, **options):
        raise OSError(12, os.strerror(12))

    monkeypatch.setattr(np, "memmap", fail)
    assert one_line(open_dataset, config) == f"{path} cannot be read: Cannot allocate memory"


@pytest.mark.parametrize("form", [".txt", ".jsonl", ".jsonl.gz", ".parquet"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, form):
    """The shards of the changed file have another folder, so those of this call are useless."""
    path = tmp_path / f"a{form}"
    rows = b"".join(b'{"text": "document %d"}\n' % i for i in range(300))
    if form == ".parquet":
        write_parquet(path, {"text": [f"document {i}" for i in range(300)]})
    else:
        path.write_bytes(gzip.compress(rows) if form == ".jsonl.gz" else rows)
    source = text_source(str(path))
    documents = source.documents() if form != ".txt" else None
    if documents:
        next(documents)
    os.utime(path, ns=(0, 0))
    with pytest.raises(BadText, match=f"a{form} changed while it was read"):
        list(documents or source.documents())


def test_a_line_has_a_bound(tmp_path, monkeypatch):
    """A .jsonl.gz of 1 MB may hold a line of 1 GB."""
    monkeypatch.setattr("data.corpus.MOST_LINE_BYTES", 10_000)
    good, bad = (json.dumps({"text": "a" * count}) for count in (9_900, 1_000_000))
    (tmp_path / "a.jsonl").write_text(f"{good}\n{bad}\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(f"{good}\n{bad}\n".encode()))
    for name in ("a.jsonl", "b.jsonl.gz"):
        line = one_line(texts_of, text_source(str(tmp_path / name)))
        assert line == f"{tmp_path / name}, line 2: it has more than 10,000 bytes; cut the document"


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "x" * 249, os.fsdecode(b"\xe9"), "[a]", "-a", "a\r"])
def test_any_name_of_a_file_is_read_and_named_in_one_line(tmp_path, name):
    path = tmp_path / f"{name}.jsonl"
    path.write_text('{"text": "a"}\n')
    assert texts_of(text_source(str(tmp_path), val_fraction=1)) == ["a"]
    path.write_text("no JSON")
    assert "line 1: not JSON" in one_line(texts_of, text_source(str(path)))


def test_any_name_of_a_column_is_named_in_one_line(tmp_path):
    for row in ({"a\nb": 1}, {f"column {i}": i for i in range(10_000)}, {"a" * 10**6: 1}):
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        line = one_line(texts_of, text_source(str(tmp_path)))
        assert "pass data.column=..., one of: " in line
        assert len(line) < 600


def full(*arguments, **options):
    raise MemoryError


class FullFile:
    """A file for which no memory is left."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()

    read = readline = full


@pytest.mark.parametrize("form", [".txt", ".jsonl", ".jsonl.gz", ".parquet"])
def test_a_text_that_does_not_fit_into_memory_is_an_error(config, tmp_path, monkeypatch, form):
    path = tmp_path / f"a{form}"
    if form == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        write_parquet(path, {"text": ["a"]})

        def fail(*arguments, **options):
            raise pa.ArrowMemoryError("malloc of size 1000000000000 failed")

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    else:
        path.write_bytes(b"text")
        opened = data.corpus.open_regular
        monkeypatch.setattr("data.corpus.open_regular", lambda *arguments, **more: FullFile(opened(*arguments, **more)))
        monkeypatch.setattr(gzip, "GzipFile", lambda fileobj: fileobj)
    config.path = str(path)
    assert one_line(open_dataset, config).startswith(f"{path} cannot be read: the memory is full; end other programs")


class FullBytes(Bytes):
    """encode() finds no memory from the tenth document on."""

    def encode(self, text):
        if "document 100" in text:
            raise MemoryError
        return super().encode(text)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_tokenizer_without_memory_is_an_error_and_the_command_resumes(tmp_path, monkeypatch, quick_python, workers):
    monkeypatch.setattr("data.pipeline.RECORD_EVERY_TOKENS", 100)
    monkeypatch.setattr("data.pipeline.PIECE_CHARACTERS", 60)
    line = one_line(write_shards, tmp_path / "x", Numbered(), FullBytes(), workers)
    assert line.startswith("the memory is full: end other programs, pass fewer workers, or use smaller documents; the")
    source = Numbered()
    write_shards(tmp_path / "x", source, Bytes(), 1)
    assert source.read[0] > 30
    write_shards(tmp_path / "y", Numbered(), Bytes(), 1)
    assert shard_bytes(tmp_path / "x") == shard_bytes(tmp_path / "y")


def test_a_writer_without_memory_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(np, "ascontiguousarray", full)
    assert one_line(write_shards, tmp_path / "x", Numbered(), Bytes(), 1).startswith("the memory is full: ")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_a_text_is_really_too_large_for_the_memory(tmp_path, quick_python, name):
    """The process may have 300 MB more than after its imports. A file of zeros has 1 GB in memory, but not on the disk.

    The line of a .jsonl.gz of 1 MB has 1 GB, too.
    """
    path = tmp_path / name
    if name.endswith(".gz"):
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(64):
                file.write(bytes(2**24))
    else:
        with path.open("wb") as file:
            file.truncate(2**30)
    program = (
        "import resource, sys, data.corpus\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + 300 * 10**6\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "try:\n"
        "    list(data.corpus.text_source(sys.argv[1]).documents())\n"
        "except data.corpus.DataError as error:\n"
        "    print(error)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.stdout.startswith(f"{path} cannot be read: the memory is full; end "), process.stderr
    assert process.stdout.count("\n") == 1
