import numpy as np
import pytest

from data.errors import DataError
from data.shards import HEADER_BYTES, chunks, open_shards, write_split

DOCUMENTS = [np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16), np.zeros(0, np.uint16)]


@pytest.fixture
def folder(tmp_path):
    write_split(tmp_path, "train", DOCUMENTS, eot=9, shard_tokens=4)
    return tmp_path


def test_files_are_llm_cs(folder):
    """Read back as llm.c's dataloader does: 256 int32 with 20240520, 1 and the count, then uint16."""
    files = sorted((folder / "train").iterdir())
    assert [file.name for file in files] == ["000000.bin", "000001.bin", "000002.bin"]
    tokens = []
    for file in files:
        header = np.frombuffer(file.read_bytes()[:1024], np.int32)
        body = np.frombuffer(file.read_bytes()[1024:], np.uint16)
        assert header[:3].tolist() == [20240520, 1, len(body)]
        assert not header[3:].any()
        tokens += body.tolist()
    assert tokens == [9, 0, 1, 2, 3, 4, 9, 0, 1, 2, 9]
    assert [len(shard) for shard in open_shards(folder, "train", 10)] == [4, 4, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 11, 12])
def test_chunks_lose_nothing(size):
    pieces = list(chunks(DOCUMENTS, 9, size))
    assert np.concatenate(pieces).tolist() == [9, 0, 1, 2, 3, 4, 9, 0, 1, 2, 9]
    assert {len(piece) for piece in pieces[:-1]} <= {size}


def test_written_once(folder):
    write_split(folder, "train", iter(lambda: pytest.fail("read again"), None), eot=9)
    assert len(open_shards(folder, "train", 10)) == 3


def test_an_interrupted_write_leaves_no_split(tmp_path):
    def broken():
        yield DOCUMENTS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_split(tmp_path, "train", broken(), eot=9, shard_tokens=2)
    assert list(tmp_path.iterdir()) == []


def test_two_writers_and_one_split(tmp_path):
    """Another process finishes the same split while this one writes: its files stay and ours go."""

    def overtaken():
        yield DOCUMENTS[0]
        write_split(tmp_path, "train", DOCUMENTS[:1], eot=8)

    write_split(tmp_path, "train", overtaken(), eot=9)
    assert open_shards(tmp_path, "train", 10)[0].tokens[0] == 8
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def damage(file, at, value):
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: damage(file, 0, b"\0"), "magic 20240384 and version 1, not 20240520 and 1"),
        (lambda file: damage(file, 4, b"\7"), "magic 20240520 and version 7"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "1031 bytes, but 4 tokens take 1032"),
        (lambda file: damage(file, 8, b"\xff\xff\xff\x7f"), "1032 bytes, but 2147483647 tokens take 4294968318"),
        (lambda file: (file.unlink(), file.mkdir()), "Is a directory"),
        (lambda file: file.write_bytes(b"short"), "5 bytes, less than the header's 1024"),
        (lambda file: damage(file, HEADER_BYTES + 2, b"\xff\xff"), "holds id 65535, but the tokenizer has only 10 ids"),
    ],
)
def test_damage_is_seen_when_opened(folder, harm, message):
    harm(folder / "train" / "000001.bin")
    with pytest.raises(DataError, match=rf"000001.bin is not a good token shard: .*{message}.*; delete "):
        open_shards(folder, "train", 10)


@pytest.mark.parametrize("missing", [["000000.bin"], ["000001.bin"], ["000000.bin", "000001.bin", "000002.bin"]])
def test_a_missing_shard_is_seen(folder, missing):
    for name in missing:
        (folder / "train" / name).unlink()
    with pytest.raises(DataError, match=r"train lacks a token shard; delete .*train to have it made again"):
        open_shards(folder, "train", 10)


def test_nowhere_to_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"token shards cannot be written to data.cache=.*: Not a directory"):
        write_split(tmp_path / "file" / "x", "train", DOCUMENTS, eot=9)
