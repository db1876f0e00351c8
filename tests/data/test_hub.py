"""data=hub reads with `datasets`. In these tests, a local folder of parquet files replaces the hub."""

import bz2
import gzip
import json
import lzma
import re
import time
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from data import open_dataset
from data.errors import DataError, hub_error
from data.hub import Hub
from data.pipeline import write_shards
from data.tokenizer import Bytes
from tests.data.test_corpus import texts_of
from tests.data.test_dataset import data_config
from tests.data.test_pipeline import shard_bytes, visible_names

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
pytest.importorskip("datasets")

TEXTS = [f"document {i} " * (i % 5 + 1) if i % 11 else None for i in range(150)]


@pytest.fixture
def folder(tmp_path):
    """150 rows in three files of three row groups each."""
    (tmp_path / "set").mkdir()
    for part in range(3):
        rows = TEXTS[50 * part : 50 * (part + 1)]
        table = pa.table({"id": range(50), "text": pa.array(rows, pa.string())})
        pq.write_table(table, tmp_path / "set" / f"train-{part:05}-of-00003.parquet", row_group_size=20)
    return tmp_path / "set"


def test_documents_are_the_rows_in_order(folder):
    documents = list(Hub(str(folder), val_fraction=0.3).documents())
    assert [document.text for document in documents] == list(filter(None, TEXTS))
    held_out = [document for document in documents if document.split == "val"]
    assert 20 < len(held_out) < 62  # of 136 documents: 41 +- 4 standard deviations


def test_a_stream_resumes_after_a_position_twice(folder):
    """The second position comes from a resumed stream. A position is in a row group, or at the end of a file."""
    documents = list(Hub(str(folder)).documents())
    for first, second in ((1, 1), (7, 40), (45, 1), (45, 46), (90, 45), (135, 1)):
        position, documents_read = None, 0
        for count in (first, second):
            source = Hub(str(folder))
            stream = source.documents(position)
            assert [next(stream) for _ in range(count)] == documents[documents_read : documents_read + count]
            position = json.loads(json.dumps(source.position()))
            documents_read += count
        assert list(Hub(str(folder)).documents(position)) == documents[documents_read:]


def test_a_resumed_stream_reads_the_revision_of_its_start(monkeypatch):
    """The hub has a newer one by then. Here no request is sent."""
    import datasets
    import huggingface_hub

    opened = []
    newest = SimpleNamespace(dataset_info=lambda path, timeout: SimpleNamespace(sha="newest"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: newest)
    builder = SimpleNamespace(config=SimpleNamespace(data_files=None), as_streaming_dataset=lambda split: None)

    def load_dataset_builder(*words, revision):
        opened.append((words, revision))
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    hub = Hub("owner/name", "subset")
    for hub.revision in (None, "first"):
        hub.open_stream()
    assert opened == [(("owner/name", "subset"), "newest"), (("owner/name", "subset"), "first")]


def test_another_path_subset_or_column_is_another_data_set():
    sources = Hub("o/n"), Hub("o/m"), Hub("o/n", "subset"), Hub("o/n", column="body")
    assert len({str(source.identity) for source in sources}) == len(sources)


def test_an_interrupted_preparation_resumes_with_the_same_bytes(folder, tmp_path, monkeypatch):
    """The stream fails in the middle, at row 70 of 150."""
    monkeypatch.setattr("data.pipeline.RECORD_EVERY_TOKENS", 100)
    monkeypatch.setattr("data.pipeline.PIECE_CHARACTERS", 60)

    class FailingHub(Hub):
        def rows(self):
            for number, row in enumerate(super().rows()):
                if number == 70:
                    raise DataError("the network is gone")
                yield row

    write_shards(tmp_path / "whole", Hub(str(folder)), Bytes(), workers=1, shard_tokens=500)
    failing = FailingHub(str(folder))
    failing.files = []  # a remote data set has no local files
    with pytest.raises(DataError, match="the network is gone"):
        write_shards(tmp_path / "parts", failing, Bytes(), workers=1, shard_tokens=500)
    watched_documents = []
    write_shards(
        tmp_path / "parts",
        Hub(str(folder)),
        Bytes(),
        workers=1,
        shard_tokens=500,
        watch=lambda documents, tokens: watched_documents.append(documents),
    )
    assert watched_documents[0] > 30
    assert shard_bytes(tmp_path / "parts") == shard_bytes(tmp_path / "whole")


def test_a_hub_data_set_is_prepared_on_first_use_when_prepare_is_auto(folder, tmp_path):
    """By default, data=hub must be prepared by hand."""
    with pytest.raises(DataError, match=r"python -m scripts.prepare data=hub data.path="):
        open_dataset(data_config(tmp_path, "hub", path=str(folder)))
    config = data_config(tmp_path, "hub", path=str(folder), prepare="auto", val_fraction=0.2)
    dataset = open_dataset(config)
    assert sum(map(len, dataset.train + dataset.val)) == sum(len(text) + 1 for text in filter(None, TEXTS))
    assert open_dataset(config).fingerprint == dataset.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column": "body"}, r"there is no column body; pass data.column=.*: id, text$"),
        ({"column": "id"}, r"column id holds int, not text"),
        ({"subset": "xx"}, r"cannot be opened: BuilderConfig 'xx' not found. Available: \['default'\]"),
        ({"path": None}, r"data=hub needs data.path=owner/name"),
        ({"path": ""}, r"data=hub needs data.path=owner/name"),
        ({"path": __file__}, r"test_hub.py is a file: name its folder, or choose data=text"),
        (
            {"path": "/no/such/folder"},
            r"data.path=/no/such/folder: there is no such folder, and it is not a name on the",
        ),
    ],
)
def test_a_wrong_column_subset_or_path_is_an_error(folder, changes, message):
    with pytest.raises(DataError, match=message) as error:
        texts_of(Hub(**{"path": str(folder), **changes}))
    assert "\n" not in str(error.value)


def test_a_folder_that_datasets_reads_as_a_pattern_is_an_error_that_says_so(folder, tmp_path):
    folder.rename(tmp_path / "r[3]")
    (tmp_path / "r3").mkdir()  # what the pattern matches
    (tmp_path / "r3" / "a.txt").write_text("another text")
    with pytest.raises(DataError, match=r"datasets reads \[ \] in a path as a pattern; rename the folder"):
        Hub(str(tmp_path / "r[3]"))


ROWS = b"".join(b'{"text": "document %d"}\n' % i for i in range(300))
GOOD = {"jsonl": ROWS, "json": b'[{"text": "a"}]', "csv": b"text\nrow\n", "txt": b"text\n"}
GOOD |= {"jsonl.gz": gzip.compress(ROWS), "jsonl.xz": lzma.compress(ROWS), "jsonl.bz2": bz2.compress(ROWS)}
with pa.BufferOutputStream() as output:
    pq.write_table(pa.table({"text": [f"document {i}" for i in range(300)]}), output)
    GOOD["parquet"] = output.getvalue().to_pybytes()
BROKEN = {  # name of a broken file -> its bytes
    **{f"cut.{ending}": GOOD[ending][:-50] for ending in ("jsonl.gz", "jsonl.xz", "jsonl.bz2", "parquet")},
    "cut.jsonl": ROWS[:-5],
    "cut.json": b'[{"text": "document"}, {"te',
    "damaged.jsonl.gz": gzip.compress(ROWS, 0).replace(b"document 7", b"document 8"),  # its checksum is wrong
    "damaged.parquet": GOOD["parquet"][:40] + b"\xff" * 40 + GOOD["parquet"][80:],
    **{f"other.{ending}": ROWS for ending in ("jsonl.gz", "jsonl.xz", "jsonl.bz2", "jsonl.zst", "parquet", "zip")},
    "not-utf8.jsonl": ROWS + b'{"text": "\xff\xfe"}\n',
    "not-utf8.txt": b"text \xff\xfe\n",
    "not-utf8.csv": b"text\nrow \xff\xfe\n",
    "not-json.jsonl": ROWS + b"{text\n",
    "numbers.jsonl": b"1\n2\n",
    "int.jsonl": ROWS + b'{"text": 3}\n',
    "list.jsonl": ROWS + b'{"text": ["a"]}\n',
    "object.jsonl": b'{"text": {"a": 1}}\n' + ROWS,
    "column.jsonl": b'{"body": "a"}\n',
    "open-quote.csv": b'text\n"row\n',
    **{f"empty.{ending}": b"" for ending in ("jsonl", "csv", "parquet")},
    "empty.jsonl.gz": gzip.compress(b""),
}
# How many texts an old or a new version of `datasets` makes of a file. It may turn values of another type into text
UNNOTICED_ALONE = {"empty.jsonl": 0, "empty.jsonl.gz": 0}
UNNOTICED = {**UNNOTICED_ALONE, "int.jsonl": 301, "list.jsonl": 301, "object.jsonl": 301}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_that_names_it_or_its_folder(tmp_path, name):
    """Alone, and behind a good file. The error does not advise to run the command again, which would not help."""
    line = f"(data set )?{re.escape(str(tmp_path))}(/{re.escape(name)})?(: | cannot be )(?!.*again).*"

    def outcome():
        """Return the number of texts, or the error: "named" if it is one line that names the file or the folder."""
        try:
            return len(texts_of(Hub(str(tmp_path))))
        except DataError as error:
            return "named" if re.fullmatch(line, str(error)) else str(error)

    ending = name.partition(".")[2]
    (tmp_path / name).write_bytes(BROKEN[name])
    assert outcome() in ("named", UNNOTICED_ALONE.get(name))
    if ending in GOOD:
        (tmp_path / f"a.{ending}").write_bytes(GOOD[ending])
        assert outcome() in ("named", 300 + UNNOTICED.get(name, -1000))


def test_a_broken_file_on_the_hub_is_named(folder):
    """There the same command may help, because the network may have failed."""
    (folder / "train-00001-of-00003.parquet").write_bytes(b"junk" * 100)
    hub = Hub(str(folder))
    hub.stream = hub.open_stream()
    hub.is_local = False
    with pytest.raises(DataError, match=r"/train-00001-of-00003.parquet: the stream stopped early: .*; run the same"):
        list(hub.rows())


def test_files_that_datasets_passes_over_are_a_warning(folder, tmp_path, capsys):
    """It takes files with one ending, in lower case. The folder is a link here."""
    for name in ("B.TXT", "c.jsonl"):
        (folder / name).write_text('{"text": "row"}\n')
    (tmp_path / "linked").symlink_to(folder)
    source = Hub(str(tmp_path / "linked"))
    assert len(texts_of(source)) == len(list(filter(None, TEXTS)))
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {folder}/B.TXT and 1 more files are not read: ")
    for name in ("B.TXT", "c.jsonl"):
        (folder / name).unlink()
    texts_of(Hub(str(tmp_path / "linked")))
    assert capsys.readouterr().err == ""


def test_a_folder_of_the_user_is_not_taken_for_the_cache(tmp_path):
    for path in (tmp_path / "data/a.txt", "a.txt"):
        assert hub_error(FileNotFoundError(2, "No such file", str(path))) == f"{path}: No such file"


@pytest.mark.parametrize("reason", ["Not a directory", "No such file or directory"])
def test_a_cache_that_cannot_be_written_is_named_by_its_path(folder, tmp_path, monkeypatch, reason):
    """Root may write everywhere, but not below a file or a broken link."""
    import datasets

    cache = tmp_path / "cache"
    if reason == "Not a directory":
        cache.touch()
    else:
        cache.symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache / "datasets"))
    with pytest.raises(DataError, match=f"data set {folder} .*{cache}.*{reason}; set HF_HOME to a folder") as error:
        texts_of(Hub(str(folder)))
    assert "\n" not in str(error.value)


def disconnect(monkeypatch):
    """Make every look-up of a host name fail after a minute."""
    import socket

    def slow_failing_lookup(*args, **kwargs):
        time.sleep(60)
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", slow_failing_lookup)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        (None, "https://huggingface.co does not answer"),
        (("ENDPOINT", "http://127.0.0.1:9"), "http://127.0.0.1:9 does not answer"),
        (("HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE forbids the download"),
    ],
)
def test_no_network_is_an_error_before_the_look_up_ends(tmp_path, monkeypatch, variable, reason):
    disconnect(monkeypatch)
    if variable:
        monkeypatch.setattr(constants, *variable)
    start = time.perf_counter()
    with pytest.raises(DataError, match=reason) as error:
        open_dataset(data_config(tmp_path, "shakespeare"))
    assert time.perf_counter() - start < 30  # 1.1 s on an idle machine
    assert "\n" not in str(error.value)
    assert visible_names(tmp_path / "cache") == set()


def test_a_prepared_data_set_needs_no_network(tmp_path, monkeypatch, folder):
    """The preparation reads the rows of `folder` in place of Tiny Shakespeare's."""
    config = data_config(tmp_path, "shakespeare")
    with monkeypatch.context() as online:
        online.setattr("data.hub.why_hub_is_unreachable", lambda: None)
        stream = Hub(str(folder)).open_stream()
        online.setattr(Hub, "open_stream", lambda self: stream)
        online.setattr("data.hub.text_of", lambda row, column, where: row["text"])  # Tiny Shakespeare's column is Text
        fingerprint = open_dataset(config).fingerprint
    disconnect(monkeypatch)
    assert open_dataset(config).fingerprint == fingerprint
