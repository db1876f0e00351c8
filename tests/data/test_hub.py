"""The hub's path through `datasets`, with a local folder of parquet files in the hub's place."""

import json
import time

import pytest

from data import open_dataset
from data.errors import DataError
from data.hub import Hub
from data.pipeline import write
from data.tokenizer import Bytes
from tests.data.test_dataset import config
from tests.data.test_pipeline import files

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


def test_every_row_in_order(folder):
    documents = list(Hub(str(folder), val_fraction=0.3).documents())
    assert [text for _, text in documents] == list(filter(None, TEXTS))
    assert 20 < sum(split == "val" for split, _ in documents) < 62  # of 136: 41 +- 4 standard deviations


def test_goes_on_behind_a_position_of_a_position(folder):
    """Twice: the state of a stream that was itself resumed. Within a row group, at a file's end and at the end."""
    everything = list(Hub(str(folder)).documents())
    for first, second in ((1, 1), (7, 40), (45, 1), (45, 46), (90, 45), (135, 1)):
        position, read = None, 0
        for count in (first, second):
            source = Hub(str(folder))
            stream = source.documents(position)
            assert [next(stream) for _ in range(count)] == everything[read : read + count]
            position, read = json.loads(json.dumps(source.position())), read + count
        assert list(Hub(str(folder)).documents(position)) == everything[read:]


def test_prepared_in_parts_is_prepared_in_one(folder, tmp_path, monkeypatch):
    """The whole way, broken off in the midst."""
    monkeypatch.setattr("data.pipeline.SYNC_TOKENS", 100)
    monkeypatch.setattr("data.pipeline.PIECE", 60)

    class Breaking(Hub):
        def rows(self):
            for number, row in enumerate(super().rows()):
                if number == 70:
                    raise DataError("broke off")
                yield row

    source = Hub(str(folder))
    write(tmp_path / "whole", source, Bytes(), 1, shard_tokens=500)
    parts = Breaking(str(folder))
    parts.files = []  # as of a remote set
    with pytest.raises(DataError, match="broke off"):
        write(tmp_path / "parts", parts, Bytes(), 1, shard_tokens=500)
    resumed = Hub(str(folder))
    told = []
    write(tmp_path / "parts", resumed, Bytes(), 1, shard_tokens=500, watch=lambda *done: told.append(done))
    assert told[0][0] > 30
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_a_data_set_of_the_hub(folder, tmp_path):
    """From the config: large unless it is said to be small, and no longer read once it is prepared."""
    with pytest.raises(DataError, match=r"python -m scripts.prepare data=hub data.path="):
        open_dataset(config(tmp_path, "hub", path=str(folder)))
    settings = config(tmp_path, "hub", path=str(folder), prepare="auto", val_fraction=0.2)
    dataset = open_dataset(settings)
    assert sum(map(len, dataset.train + dataset.val)) == sum(len(text) + 1 for text in filter(None, TEXTS))
    assert open_dataset(settings).fingerprint == dataset.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column": "body"}, r"there is no column body; pass data.column=.*: id, text$"),
        ({"column": "id"}, r"column id holds int and not text"),
        ({"subset": "xx"}, r"cannot be opened: BuilderConfig 'xx' not found. Available: \['default'\]"),
        ({"path": None}, r"data=hub needs data.path=owner/name"),
        ({"path": ""}, r"data=hub needs data.path=owner/name"),
        ({"path": "~nobody-here/x"}, r"data.path=~nobody-here/x: there can be no such file or folder"),
    ],
)
def test_what_is_not_in_the_set(folder, changes, message):
    with pytest.raises(DataError, match=message) as error:
        list(Hub(**{"path": str(folder), **changes}).documents())
    assert "\n" not in str(error.value)


def test_a_broken_file(folder):
    (folder / "train-00001-of-00003.parquet").write_bytes(b"junk" * 100)
    with pytest.raises(DataError, match=r"broke off: .*Parquet.*; the same command goes on where it ended"):
        list(Hub(str(folder)).documents())


def offline(monkeypatch):
    """A network on which no name is ever found."""
    import socket

    def lookup(*args, **kwargs):
        time.sleep(5)
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        (None, "https://huggingface.co does not answer"),
        (("HF_ENDPOINT", "http://127.0.0.1:9"), "http://127.0.0.1:9 does not answer"),
        (("HF_HUB_OFFLINE", "1"), "HF_HUB_OFFLINE forbids the network"),
    ],
)
def test_no_network_is_a_line_within_two_seconds(tmp_path, monkeypatch, variable, why):
    offline(monkeypatch)
    if variable:
        monkeypatch.setenv(*variable)
    start = time.perf_counter()
    with pytest.raises(DataError, match=why) as error:
        open_dataset(config(tmp_path, "shakespeare"))
    assert time.perf_counter() - start < 2
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").iterdir())


def test_a_prepared_set_needs_no_network(tmp_path, monkeypatch, folder):
    """Nor `datasets`."""
    settings = config(tmp_path, "shakespeare")
    with monkeypatch.context() as online:
        online.setattr("data.hub.check_network", lambda path: None)
        local = Hub(str(folder)).load()
        online.setattr(Hub, "load", lambda self: local)
        online.setattr("data.hub.text_of", lambda row, column, where: row["text"])
        fingerprint = open_dataset(settings).fingerprint
    offline(monkeypatch)
    monkeypatch.setattr("data.hub.find_spec", lambda name: None)
    assert open_dataset(settings).fingerprint == fingerprint


def test_without_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("data.hub.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"Trelis/tiny-shakespeare needs Hugging Face's datasets: pip install datasets"):
        open_dataset(config(tmp_path, "shakespeare"))
