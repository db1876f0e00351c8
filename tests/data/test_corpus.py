import gzip
import json
import os
import sysconfig
from pathlib import Path

import pytest

from data.corpus import FILES_TO_SPLIT_BY_HASH, split_of, stdlib_source, text_source
from data.errors import DataError
from data.paths import SUFFIXES


def texts_of(source, split=None):
    """Return the texts of one split of a source, or of both splits if `split` is None."""
    return [document.text for document in source.documents() if split in (None, document.split)]


def test_stdlib_is_python_source_split_by_file():
    source = stdlib_source()
    root = Path(sysconfig.get_path("stdlib"))
    names = {file.relative_to(root).as_posix() for file in source.files}
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= names
    assert not [name for name in names if "site-packages" in name or "/test/" in name]
    train, val = texts_of(source, "train"), texts_of(source, "val")
    assert len(train) + len(val) == len(source.files)
    assert not set(filter(None, train)) & set(filter(None, val))
    assert 0.05 < len(val) / len(source.files) < 0.15
    assert sum(map(len, train)) > 5e6


def test_a_new_file_does_not_change_the_split_of_others(folder):
    before = set(texts_of(text_source(str(folder)), "val"))
    (folder / "aaa.txt").write_text("something new")
    after = set(texts_of(text_source(str(folder)), "val"))
    assert before
    assert after - before <= {"something new"}
    assert before <= after


def test_data_path_takes_files_folders_globs_and_lists(folder):
    assert len(text_source(str(folder)).files) == 30
    assert len(text_source(f"{folder}/**/*.md").files) == 10
    assert len(text_source([f"{folder}/part0", f"{folder}/part1/01.md", f"{folder}/part0/00.txt"]).files) == 11
    assert text_source(f"{folder}/part0/00.txt").files == [folder / "part0" / "00.txt"]


def test_unusual_names_are_read_or_skipped(folder, tmp_path, monkeypatch):
    """A name may look like a glob or a number. Hidden folders, folders named *.txt and dangling links are skipped."""
    for name in ("a[1].txt", "2024.txt"):
        (tmp_path / name).write_text("text")
        assert len(text_source(str(tmp_path / name)).files) == 1
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "x.md").write_text("text")
    (folder / "not_a_file.txt").mkdir()
    (folder / "gone.txt").symlink_to(folder / "nowhere.txt")
    (folder / ".git").mkdir()
    (folder / ".git" / "hidden.txt").write_text("text")
    assert len(text_source(str(folder)).files) == 30
    monkeypatch.chdir(tmp_path)
    assert [file.name for file in text_source(2024).files] == ["x.md"]


def test_a_link_counts_once_under_its_own_name(tmp_path, monkeypatch):
    """In Hugging Face's cache and in git-annex a link's target has no suffix. Two links to one file count once."""
    blobs, names = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    names.mkdir(parents=True)
    (blobs / "3f786850").write_text('{"text": "row"}\n')
    (blobs / "89e6c98d").write_text("plain")
    (names / "a.jsonl").symlink_to("../../blobs/3f786850")
    (names / "b.txt").symlink_to("../../blobs/89e6c98d")
    (names / "also_b.txt").symlink_to("b.txt")
    monkeypatch.chdir(tmp_path)
    for path in ("snapshots/main", "snapshots/main/*", ["snapshots/main/a.jsonl", "snapshots/main/*b.txt"]):
        source = text_source(path, val_fraction=1)
        assert [file.name for file in source.files] == ["a.jsonl", "also_b.txt"]
        assert texts_of(source) == ["row", "plain"]
    assert text_source("snapshots/main/b.txt").files == [names / "b.txt"]
    (blobs / "89e6c98d").unlink()
    assert [file.name for file in text_source("snapshots/main/*").files] == ["a.jsonl"]
    with pytest.raises(DataError, match=r"data.path=snapshots/main/b.txt: no such file or folder"):
        text_source("snapshots/main/b.txt")


def test_links_to_folders_are_followed_and_each_folder_counts_once(folder, tmp_path):
    """A link may lead to a folder above it. Links to hidden folders are hidden only by their own name."""
    (tmp_path / "elsewhere" / ".hidden").mkdir(parents=True)
    (tmp_path / "elsewhere" / ".hidden" / "b.txt").write_text("hidden")
    (tmp_path / "elsewhere" / "a.txt").write_text("text")
    (folder / "link").symlink_to("../elsewhere")
    (folder / "same").symlink_to(tmp_path / "elsewhere")
    (folder / "part0" / "loop").symlink_to(folder)
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path)
    (folder / ".skipped").symlink_to(tmp_path / "elsewhere" / ".hidden")
    names = {file.relative_to(folder).as_posix() for file in text_source(str(folder)).files}
    assert len(names) == 31
    assert "link/a.txt" in names
    (folder / "shown").symlink_to(tmp_path / "elsewhere" / ".hidden")
    assert len(text_source(str(folder)).files) == 32
    assert len(text_source(str(folder / "[ps]*")).files) == 32


def test_a_folder_that_cannot_be_read_is_an_error(folder, monkeypatch):
    """The tests may run as root, which may read every folder."""

    def scandir(path, original=os.scandir):
        if str(path).endswith("part1"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="/part1 cannot be read: Permission denied"):
        text_source(str(folder))


def test_an_ending_may_be_in_any_case(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for suffix in SUFFIXES:
        for ending in {suffix.upper(), suffix.title()}:
            row = b'{"text": "row"}\n' if "jsonl" in suffix else b"row"
            row = gzip.compress(row) if suffix.endswith(".gz") else row
            file = tmp_path / suffix.strip(".") / f"B{ending}"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(row)
            if suffix == ".parquet":
                pq.write_table(pa.table({"text": ["row"]}), file)
        assert texts_of(text_source(str(tmp_path / suffix.strip(".")), val_fraction=1)) == ["row", "row"]


def test_a_byte_order_mark_is_removed(tmp_path):
    for name in ("a.txt", "b.md", "c.py"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbfx = 1")
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x = 1"}\n')
    assert texts_of(text_source(str(tmp_path), val_fraction=1)) == ["x = 1"] * 4


def test_few_files_are_split_by_position(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 2)
    (tmp_path / "b.txt").write_text("abcdefghij")
    source = text_source(str(tmp_path))
    assert len(source.files) < FILES_TO_SPLIT_BY_HASH
    assert texts_of(source, "train") == ["012345678901234567", "abcdefghi"]
    assert texts_of(source, "val") == ["89", "j"]
    assert texts_of(text_source(str(tmp_path), val_fraction=0.3), "val") == ["456789", "hij"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "data=text needs data.path"),
        ([], "data=text needs data.path"),
        ("", "data=text needs data.path"),
        (["{docs}", ""], "data=text needs data.path"),
        ([None], "data=text needs data.path"),
        ("x" * 5000, "is not a valid path: File name too long"),
        ({"a": 1}, "data=text needs data.path"),
        ("nowhere", "data.path=nowhere: no such file or folder"),
        ("{docs}/image.png", r"image.png does not end with one of .txt, .md, .py, .jsonl, .jsonl.gz, .parquet"),
        ("{docs}/empty", "no file in it ends with one of .txt, .md, .py, .jsonl, .jsonl.gz, .parquet"),
    ],
)
def test_a_path_without_text_is_an_error(folder, path, message):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        text_source(path.format(docs=folder) if isinstance(path, str) else path)


def test_files_that_are_not_utf8_can_be_repaired_or_skipped(tmp_path, capsys):
    """data.encoding_errors=replace keeps the rest of the file. skip names the file in a warning, here with an ESC."""
    (tmp_path / "a\x1b[2J.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / "b.txt").write_text("summer")
    texts = {}
    for errors in ("replace", "skip"):
        source = text_source(str(tmp_path), val_fraction=1, encoding_errors=errors)
        texts[errors] = texts_of(source)
        assert source.identity[-1] == errors  # other tokens, so another folder of shards
    assert texts == {"replace": ["\ufffdt\ufffd", "summer"], "skip": ["summer"]}
    assert capsys.readouterr().err == f"warning: {tmp_path}/a\\x1b[2J.txt is not UTF-8 text (byte 0), and is skipped\n"


def test_the_error_names_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 text \(byte 0\)"):
        texts_of(text_source(str(tmp_path)))


def write_parquet(path, columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path, row_group_size=300)


def write_rows(folder, texts, form):
    """Write the texts as .jsonl, .jsonl.gz or .parquet into the folder `folder/form`."""
    (folder / form).mkdir()
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    if form == "jsonl":
        (folder / form / "a.jsonl").write_text(lines + "\n")
    elif form == "gz":
        (folder / form / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    else:
        write_parquet(folder / form / "a.parquet", {"id": range(len(texts)), "text": texts})


@pytest.mark.parametrize("form", ["jsonl", "gz", "parquet"])
def test_every_row_is_a_document(tmp_path, form):
    """An empty text is a document too; null is not. The split depends only on the text."""
    texts = [f"document {i}\nä" for i in range(600)] + [None, ""]
    write_rows(tmp_path, texts, form)
    source = text_source(str(tmp_path / form), val_fraction=0.2)
    documents = list(source.documents())
    assert [document.text for document in documents] == [*texts[:600], ""]
    assert all(document.split == split_of(document.text, 0.2) for document in documents)
    assert 0.14 < len(texts_of(source, "val")) / 601 < 0.26  # 0.2 +- 4 standard deviations


@pytest.mark.parametrize("form", ["jsonl", "gz", "parquet"])
def test_a_source_resumes_after_a_position(tmp_path, form):
    texts = [f"document {i}" if i % 7 else None for i in range(40)]
    write_rows(tmp_path, texts, form)
    for i in range(3):
        (tmp_path / form / f"{i}.txt").write_text(f"plain text {i}")
    documents = list(text_source(str(tmp_path / form)).documents())
    source = text_source(str(tmp_path / form))
    for count, document in enumerate(source.documents(), 1):
        assert document == documents[count - 1]
        position = json.loads(json.dumps(source.position()))
        assert list(text_source(str(tmp_path / form)).documents(position)) == documents[count:]


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d \\ud83d\\ude00"}\n')
    assert texts_of(text_source(str(tmp_path))) == ["a\ufffd \U0001f600"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl, line 2: not JSON \(.*; correct or delete the line"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xe9"}\n', r"a.jsonl, line 3: not JSON \(.*utf-8"),
        ("a.jsonl", b'{"id": 1, "body": "a"}\n', r"line 1: there is no column text; pass data.column=.*: id, body$"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1: column text holds int, not text"),
        ("a.jsonl", b"{}\n", r"line 1: there is no column text and no other column$"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 200_000, r"a.jsonl, line 2: not JSON \(maximum recursion depth"),
        ("a.jsonl", b"[1]\n", r"line 1: a row must be a JSON object with a column text"),
        ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9],
            r"a.jsonl.gz cannot be read: Compressed file ended",
        ),
        ("a.parquet", b"no parquet", r"a.parquet cannot be read: Parquet"),
    ],
)
def test_the_error_names_a_broken_row_or_file(tmp_path, name, content, message):
    if name == "a.parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        texts_of(text_source(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_parquet_file_without_the_column_is_an_error(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"id": [1], "body": ["a"], "n": [2]})
    with pytest.raises(DataError, match=r"a.parquet: there is no column text; pass data.column=.*: id, body, n$"):
        texts_of(text_source(str(tmp_path)))
    assert texts_of(text_source(str(tmp_path), column="body")) == ["a"]
    with pytest.raises(DataError, match=r"a.parquet, row 1: column n holds int, not text"):
        texts_of(text_source(str(tmp_path), column="n"))
