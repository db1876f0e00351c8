import hashlib
import os
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from data import DataConfig, open_dataset
from data.corpus import SPLIT_BY_FILE, stdlib, text
from data.errors import DataError
from data.tokenizer import GPT2, GPT2_FILES, Bytes


def config(tmp_path, **changes):
    settings = {"source": "text", "path": None, "tokenizer": "bytes", "cache": str(tmp_path / "cache")}
    return DataConfig(**settings | changes)


@pytest.fixture
def folder(tmp_path):
    """30 documents in a tree, and files that are no text."""
    for i in range(30):
        file = tmp_path / "docs" / f"part{i % 3}" / f"{i:02}.{('txt', 'md', 'py')[i % 3]}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"document {i}: " + "ä" * i)
    (tmp_path / "docs" / "image.png").write_bytes(b"\x89PNG\xff")
    return tmp_path / "docs"


def test_stdlib_is_real_text_split_by_file():
    source = stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    names = {file.relative_to(root).as_posix() for file in source.files}
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= names
    assert not [name for name in names if "site-packages" in name or "/test/" in name]
    train, val = (list(source.documents(split)) for split in ("train", "val"))
    assert len(train) + len(val) == len(source.files)
    assert not set(filter(None, train)) & set(filter(None, val))
    assert 0.05 < len(val) / len(source.files) < 0.15
    assert sum(map(len, train)) > 5e6


def test_adding_a_file_moves_no_other(folder):
    before = set(text(str(folder)).documents("val"))
    (folder / "aaa.txt").write_text("something new")
    after = set(text(str(folder)).documents("val"))
    assert before
    assert after - before <= {"something new"}
    assert before <= after


def test_files_folders_globs_and_lists(folder):
    assert len(text(str(folder)).files) == 30
    assert len(text(f"{folder}/**/*.md").files) == 10
    assert len(text([f"{folder}/part0", f"{folder}/part1/01.md", f"{folder}/part0/00.txt"]).files) == 11
    assert text(f"{folder}/part0/00.txt").files == [folder / "part0" / "00.txt"]


def test_names_that_are_hard(folder, tmp_path, monkeypatch):
    """A name that looks like a glob or a number; folders and dangling links that end in .txt; hidden folders."""
    for name in ("a[1].txt", "2024.txt"):
        (tmp_path / name).write_text("text")
        assert len(text(str(tmp_path / name)).files) == 1
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "x.md").write_text("text")
    (folder / "not_a_file.txt").mkdir()
    (folder / "gone.txt").symlink_to(folder / "nowhere.txt")
    (folder / ".git").mkdir()
    (folder / ".git" / "hidden.txt").write_text("text")
    assert len(text(str(folder)).files) == 30
    monkeypatch.chdir(tmp_path)
    assert [file.name for file in text(2024).files] == ["x.md"]


def test_few_files_are_split_by_position(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 2)
    (tmp_path / "b.txt").write_text("abcdefghij")
    source = text(str(tmp_path))
    assert len(source.files) < SPLIT_BY_FILE
    assert list(source.documents("train")) == ["012345678901234567", "abcdefghi"]
    assert list(source.documents("val")) == ["89", "j"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "data=text needs data.path"),
        ([], "data=text needs data.path"),
        ({"a": 1}, "data=text needs data.path"),
        ("nowhere", "data.path=nowhere: no such file or folder"),
        ("{docs}/image.png", "image.png is none of .txt, .md, .py"),
        ("{docs}/empty", "holds no .txt, .md, .py file"),
    ],
)
def test_paths_that_hold_no_text(folder, path, message):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        text(path.format(docs=folder) if isinstance(path, str) else path)


def test_what_is_not_utf8_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 text \(byte 0\)"):
        list(text(str(tmp_path)).documents("train"))


def test_a_dataset_is_its_text(folder, tmp_path):
    """From files to shards and back: every document, each behind an end of text."""
    dataset = open_dataset(config(tmp_path, path=str(folder)))
    for split in ("train", "val"):
        tokens = np.concatenate([shard.tokens for shard in getattr(dataset, split)])
        documents = [
            dataset.tokenizer.decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == 256))
        ]
        assert documents[1:] == list(text(str(folder)).documents(split))


def test_a_changed_file_is_tokenized_again(folder, tmp_path):
    settings = config(tmp_path, path=str(folder))
    first = open_dataset(settings).train[0].path
    assert open_dataset(settings).train[0].path == first
    file = folder / "part0" / "00.txt"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert open_dataset(settings).train[0].path != first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "web"}, "data.source=web: choose stdlib or text"),
        ({"tokenizer": "llama"}, "data.tokenizer=llama: choose bytes or gpt2"),
    ],
)
def test_unknown_names(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        config(tmp_path, **changes)


def test_a_path_for_the_stdlib_is_a_mistake():
    with pytest.raises(DataError, match=r"data.path=book.txt is for your own text: add data=text"):
        stdlib("book.txt")


def test_bytes_round_trip():
    tokenizer, sentence = Bytes(), "naïve — 数学 \n\0"
    ids = tokenizer.encode(sentence)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(sentence.encode())
    assert tokenizer.decode([256, *ids.tolist(), 300]) == sentence


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No vocabulary in the cache, and a network on which no name is ever found."""
    import socket

    def lookup(*args, **kwargs):
        time.sleep(5)
        raise OSError("no such host")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_gpt2_without_files_and_network_is_a_line_within_two_seconds(offline):
    start = time.perf_counter()
    with pytest.raises(DataError, match="set TIKTOKEN_CACHE_DIR to a folder that tiktoken filled") as error:
        GPT2()
    assert time.perf_counter() - start < 2
    assert "\n" not in str(error.value)


def test_gpt2_with_a_damaged_cache_and_no_network(offline, tmp_path):
    """Files of the right names and the wrong bytes are no vocabulary."""
    for url in GPT2_FILES:
        (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_text("broken")
    with pytest.raises(DataError, match=r"data.tokenizer=gpt2 needs GPT-2's vocabulary"):
        GPT2()


def test_gpt2_ids(monkeypatch):
    """With a vocabulary of the single bytes in place of OpenAI's, which is not ours to ship."""
    single = tiktoken.Encoding(
        "single",
        pat_str=r".",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 50256},
    )
    monkeypatch.setattr("data.tokenizer.cached", lambda: True)
    monkeypatch.setattr("tiktoken.get_encoding", {"gpt2": single}.__getitem__)
    tokenizer = GPT2()
    ids = tokenizer.encode("né<|endoftext|>")
    assert ids.dtype == np.uint16
    assert ids.tolist() == list("né<|endoftext|>".encode())  # text that looks like a special token is text
    assert tokenizer.decode([50256, *ids.tolist(), 50300]) == "né<|endoftext|>"


def test_gpt2_ids_are_published():
    """Where the vocabulary is to be had: the ids that OpenAI's own encoder gives."""
    try:
        tokenizer = GPT2()
    except DataError as error:
        pytest.skip(str(error))
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
