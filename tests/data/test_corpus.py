import gzip
import json
import sysconfig
from pathlib import Path

import pytest

from data.corpus import SPLIT_BY_FILE, side, stdlib, text
from data.errors import DataError


def of(source, split):
    return [document for side, document in source.documents() if side == split]


def test_stdlib_is_real_text_split_by_file():
    source = stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    names = {file.relative_to(root).as_posix() for file in source.files}
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= names
    assert not [name for name in names if "site-packages" in name or "/test/" in name]
    train, val = (of(source, split) for split in ("train", "val"))
    assert len(train) + len(val) == len(source.files)
    assert not set(filter(None, train)) & set(filter(None, val))
    assert 0.05 < len(val) / len(source.files) < 0.15
    assert sum(map(len, train)) > 5e6


def test_adding_a_file_moves_no_other(folder):
    before = set(of(text(str(folder)), "val"))
    (folder / "aaa.txt").write_text("something new")
    after = set(of(text(str(folder)), "val"))
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


def test_links_have_names_of_their_own(tmp_path, monkeypatch):
    """As Hugging Face's cache and git-annex have them: a target without a suffix. One file of two names counts once."""
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
        source = text(path, val_fraction=1)
        assert [file.name for file in source.files] == ["a.jsonl", "also_b.txt"]
        assert [document for _, document in source.documents()] == ["row", "plain"]
    assert text("snapshots/main/b.txt").files == [names / "b.txt"]
    (blobs / "89e6c98d").unlink()
    assert [file.name for file in text("snapshots/main/*").files] == ["a.jsonl"]
    with pytest.raises(DataError, match=r"data.path=snapshots/main/b.txt: no such file or folder"):
        text("snapshots/main/b.txt")


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name in ("a.txt", "b.md", "c.py"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbfx = 1")
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x = 1"}\n')
    assert [document for _, document in text(str(tmp_path), val_fraction=1).documents()] == ["x = 1"] * 4


def test_few_files_are_split_by_position(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 2)
    (tmp_path / "b.txt").write_text("abcdefghij")
    source = text(str(tmp_path))
    assert len(source.files) < SPLIT_BY_FILE
    assert of(source, "train") == ["012345678901234567", "abcdefghi"]
    assert of(source, "val") == ["89", "j"]
    assert of(text(str(tmp_path), val_fraction=0.3), "val") == ["456789", "hij"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "data=text needs data.path"),
        ([], "data=text needs data.path"),
        ("", "data=text needs data.path"),
        (["{docs}", ""], "data=text needs data.path"),
        ([None], "data=text needs data.path"),
        ("~nobody-here/x", "data.path=~nobody-here/x: there can be no such file or folder: Could not determine home"),
        ("x" * 5000, "there can be no such file or folder: File name too long"),
        ({"a": 1}, "data=text needs data.path"),
        ("nowhere", "data.path=nowhere: no such file or folder"),
        ("{docs}/image.png", r"image.png is none of .txt, .md, .py, .jsonl, .jsonl.gz, .parquet"),
        ("{docs}/empty", "holds no .txt, .md, .py, .jsonl, .jsonl.gz, .parquet file"),
    ],
)
def test_paths_that_hold_no_text(folder, path, message):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        text(path.format(docs=folder) if isinstance(path, str) else path)


def test_what_is_not_utf8_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 text \(byte 0\)"):
        list(text(str(tmp_path)).documents())


def test_a_path_for_the_stdlib_is_a_mistake():
    with pytest.raises(DataError, match=r"data.path=book.txt is for your own text: add data=text"):
        stdlib("book.txt")


def write_parquet(path, columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path, row_group_size=300)


def rows(folder, texts, form):
    """These documents as .jsonl, .jsonl.gz or .parquet, in a folder of that name."""
    (folder / form).mkdir()
    lines = "".join(json.dumps({"id": i, "text": each}) + "\n" for i, each in enumerate(texts))
    if form == "jsonl":
        (folder / form / "a.jsonl").write_text(lines + "\n")
    elif form == "gz":
        (folder / form / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    else:
        write_parquet(folder / form / "a.parquet", {"id": range(len(texts)), "text": texts})


@pytest.mark.parametrize("form", ["jsonl", "gz", "parquet"])
def test_every_row_is_a_document(tmp_path, form):
    """Null is none, an empty text is one; what is held out depends on the text alone."""
    texts = [f"document {i}\nä" for i in range(600)] + [None, ""]
    rows(tmp_path, texts, form)
    source = text(str(tmp_path / form), val_fraction=0.2)
    documents = list(source.documents())
    assert [document for _, document in documents] == [*texts[:600], ""]
    assert all(split == side(document, 0.2) for split, document in documents)
    assert 0.14 < len(of(source, "val")) / 601 < 0.26  # 0.2 +- 4 standard deviations


@pytest.mark.parametrize("form", ["jsonl", "gz", "parquet"])
def test_a_source_goes_on_behind_a_position(tmp_path, form):
    texts = [f"document {i}" if i % 7 else None for i in range(40)]
    rows(tmp_path, texts, form)
    for i in range(3):
        (tmp_path / form / f"{i}.txt").write_text(f"plain text {i}")
    everything = list(text(str(tmp_path / form)).documents())
    source = text(str(tmp_path / form))
    for count, document in enumerate(source.documents(), 1):
        assert document == everything[count - 1]
        position = json.loads(json.dumps(source.position()))
        assert list(text(str(tmp_path / form)).documents(position)) == everything[count:]


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d \\ud83d\\ude00"}\n')
    assert [document for _, document in text(str(tmp_path)).documents()] == ["a\ufffd \U0001f600"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl, line 2: not JSON \(.*; correct the line, or take it out"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xe9"}\n', r"a.jsonl, line 3: not JSON \(.*utf-8"),
        ("a.jsonl", b'{"id": 1, "body": "a"}\n', r"line 1: there is no column text; pass data.column=.*: id, body$"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1: column text holds int and not text"),
        ("a.jsonl", b"{}\n", r"line 1: there is no column text, nor any other$"),
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
def test_broken_rows_are_named(tmp_path, name, content, message):
    if name == "a.parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        list(text(str(tmp_path)).documents())
    assert "\n" not in str(error.value)


def test_parquet_without_the_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"id": [1], "body": ["a"], "n": [2]})
    with pytest.raises(DataError, match=r"a.parquet: there is no column text; pass data.column=.*: id, body, n$"):
        list(text(str(tmp_path)).documents())
    assert [document for _, document in text(str(tmp_path), column="body").documents()] == ["a"]
    with pytest.raises(DataError, match=r"a.parquet, row 1: column n holds int and not text"):
        list(text(str(tmp_path), column="n").documents())
