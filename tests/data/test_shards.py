import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from data.errors import DataError
from data.shards import HEADER_BYTES, SHARD_TOKENS, Writer, digest, open_nanogpt, open_shards, read_through

DOCUMENTS = [np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16), np.zeros(0, np.uint16)]
STREAM = [9, 0, 1, 2, 3, 4, 9, 0, 1, 2, 9]


def write_split(folder, split, documents, eot, shard_tokens=SHARD_TOKENS):
    """A split of these documents, each behind an eot."""
    writer = Writer(folder / split, shard_tokens)
    for document in documents:
        writer.append(np.append(np.uint16(eot), document))
    writer.finish()


@pytest.fixture
def folder(tmp_path):
    write_split(tmp_path, "train", DOCUMENTS, eot=9, shard_tokens=4)
    return tmp_path


def bins(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.bin"))}


def test_files_are_llm_cs(folder):
    """Read back as llm.c's dataloader does: 256 int32 with 20240520, 1 and the count, then uint16."""
    files = sorted((folder / "train").iterdir())
    assert [file.name for file in files] == ["000000.bin", "000001.bin", "000002.bin", "index.json"]
    tokens = []
    for file in files[:-1]:
        header = np.frombuffer(file.read_bytes()[:1024], np.int32)
        body = np.frombuffer(file.read_bytes()[1024:], np.uint16)
        assert header[:3].tolist() == [20240520, 1, len(body)]
        assert not header[3:].any()
        tokens += body.tolist()
    assert tokens == STREAM
    assert [len(shard) for shard in open_shards(folder, "train", 10)] == [4, 4, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 11, 12])
def test_shards_lose_nothing(tmp_path, size):
    write_split(tmp_path, "train", DOCUMENTS, eot=9, shard_tokens=size)
    shards = open_shards(tmp_path, "train", 10)
    assert np.concatenate([shard.tokens for shard in shards]).tolist() == STREAM
    assert {len(shard) for shard in shards[:-1]} <= {size}


@pytest.mark.parametrize("lost", [0, 1, 3, 7])
@pytest.mark.parametrize("kept", [0, 2, 4, 5, 10])
def test_a_writer_goes_on_behind_what_it_synced(tmp_path, kept, lost):
    """`kept` tokens are synced, `lost` more are written before the end comes: the files are those of one go."""
    tokens = np.arange(11, dtype=np.uint16)
    whole = Writer(tmp_path / "whole", 4)
    whole.append(tokens)
    whole.finish()
    first = Writer(tmp_path / "parts", 4)
    first.append(tokens[:kept])
    done = json.loads(json.dumps(first.sync()))
    first.append(np.full(lost, 50, np.uint16))
    first.close()
    second = Writer(tmp_path / "parts", 4, done)
    assert second.tokens == kept
    second.append(tokens[kept:])
    second.finish()
    assert bins(tmp_path / "parts") == bins(tmp_path / "whole")
    indices = [json.loads((tmp_path / name / "index.json").read_text()) for name in ("parts", "whole")]
    for facts in (facts for index in indices for facts in index.values()):
        del facts["mtime_ns"]
    assert indices[0] == indices[1]


def test_a_writer_without_what_it_synced(tmp_path):
    writer = Writer(tmp_path / "train", 4)
    writer.append(np.arange(3, dtype=np.uint16))
    done = writer.sync()
    writer.close()
    damage(tmp_path / "train" / "000000.bin", 0, b"", cut=1)
    with pytest.raises(DataError, match=r"000000.bin is shorter than the progress beside it tells; delete "):
        Writer(tmp_path / "train", 4, done)


def test_an_unfinished_shard_is_none(tmp_path):
    writer = Writer(tmp_path / "train")
    writer.append(DOCUMENTS[0])
    writer.sync()
    writer.close()
    with pytest.raises(DataError, match=r"000000.bin is not a good token shard: magic 0 and version 0"):
        open_shards(tmp_path, "train", 10)


def damage(file, at, value, cut=0):
    """Other bytes, and a later time of change: a file system's clock may tick only every 10 ms."""
    later = file.stat().st_mtime_ns + 10**9
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    file.write_bytes(data[: len(data) - cut])
    os.utime(file, ns=(later, later))


HARMS = [
    (lambda file: damage(file, 0, b"\0"), "magic 20240384 and version 1, not 20240520 and 1"),
    (lambda file: damage(file, 4, b"\7"), "magic 20240520 and version 7"),
    (lambda file: damage(file, 0, b"", cut=1), "1031 bytes, but 4 tokens take 1032"),
    (lambda file: damage(file, 8, b"\xff\xff\xff\x7f"), "1032 bytes, but 2147483647 tokens take 4294968318"),
    (lambda file: (file.unlink(), file.mkdir()), "Is a directory"),
    (lambda file: file.write_bytes(b"short"), "5 bytes, less than the header's 1024"),
    (lambda file: damage(file, HEADER_BYTES + 2, b"\xff\xff"), "holds id 65535, but the tokenizer has only 10 ids"),
    (lambda file: damage(file, HEADER_BYTES + 2, b"\x01"), "its tokens are not those that were written"),
]


@pytest.mark.parametrize(("harm", "message"), HARMS)
def test_damage_is_seen_when_opened(folder, harm, message):
    harm(folder / "train" / "000001.bin")
    with pytest.raises(DataError, match=rf"000001.bin is not a good token shard: .*{message}.*; delete "):
        open_shards(folder, "train", 10)


@pytest.mark.parametrize(("harm", "message"), HARMS[:-1])
def test_damage_is_seen_without_an_index(folder, harm, message):
    """All but tokens that are other tokens."""
    (folder / "train" / "index.json").unlink()
    harm(folder / "train" / "000001.bin")
    with pytest.raises(DataError, match=rf"000001.bin is not a good token shard: .*{message}.*; delete "):
        open_shards(folder, "train", 10)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("missing", [["000000.bin"], ["000001.bin"], ["000000.bin", "000001.bin", "000002.bin"]])
def test_a_missing_shard_is_seen(folder, missing, index):
    for name in missing + ["index.json"] * (not index):
        (folder / "train" / name).unlink()
    with pytest.raises(DataError, match=r"train lacks a token shard; delete .* to have it made again"):
        open_shards(folder, "train", 10)


def test_a_missing_last_shard_is_seen(folder):
    (folder / "train" / "000002.bin").unlink()
    with pytest.raises(DataError, match=r"train lacks a token shard"):
        open_shards(folder, "train", 10)


@pytest.fixture
def readings(monkeypatch):
    """How many tokens each reading-through of a shard took."""
    lengths = []
    monkeypatch.setattr("data.shards.read_through", lambda tokens: lengths.append(len(tokens)) or read_through(tokens))
    return lengths


def test_a_shard_is_read_through_only_where_its_file_is_another(folder, tmp_path, readings):
    """Not when it was just written, once when it was copied or its index is gone, and not again."""
    here = digest(open_shards(folder, "train", 10))
    assert readings == []
    copy = tmp_path / "copy"
    shutil.copytree(folder / "train", copy / "train", copy_function=shutil.copyfile)
    for file in (copy / "train").glob("*.bin"):
        os.utime(file, ns=(10**18, 10**18))
    for _ in range(2):
        assert digest(open_shards(copy, "train", 10)) == here
        assert readings == [4, 4, 3]
    (copy / "train" / "index.json").unlink()
    for _ in range(2):
        assert digest(open_shards(copy, "train", 10)) == here
        assert readings == [4, 4, 3] * 2


def test_the_digest_is_of_the_tokens_and_their_cut(tmp_path):
    for name, documents, size in (("a", DOCUMENTS, 4), ("b", DOCUMENTS, 5), ("c", DOCUMENTS[:2], 4)):
        write_split(tmp_path, name, documents, eot=9, shard_tokens=size)
    shards = {name: open_shards(tmp_path, name, 10) for name in "abc"}
    assert len({digest(each) for each in shards.values()}) == 3
    hashes = [hashlib.sha256(bytes(shard.tokens)).hexdigest() for shard in shards["a"]]  # independent of the index
    assert digest(shards["a"]) == hashlib.sha256("".join(hashes).encode()).hexdigest()


def test_a_read_only_index_costs_a_reading_and_nothing_else(folder, readings, monkeypatch):
    (folder / "train" / "index.json").unlink()
    monkeypatch.setattr("data.shards.write_json", lambda *_: (_ for _ in ()).throw(OSError("read-only")))
    for _ in range(2):
        assert len(open_shards(folder, "train", 10)) == 3
    assert readings == [4, 4, 3] * 2


def test_nanogpts_files_are_read_as_they_are(tmp_path, readings):
    """Without a header, without a copy, and read through once."""
    for name, count in (("train", 100), ("val", 7)):
        np.arange(count, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    for _ in range(2):
        train, val = open_nanogpt(tmp_path, 100, tmp_path / "cache")
        assert train[0].tokens.tolist() == list(range(100))
        assert val[0].tokens.tolist() == list(range(7))
        assert readings == [100, 7]
    damage(tmp_path / "val.bin", 0, b"\x07")  # the user's own file: another text, and no damage
    train, changed = open_nanogpt(tmp_path, 100, tmp_path / "cache")
    assert changed[0].tokens[0] == 7
    assert digest(changed) != digest(val)
    assert readings == [100, 7, 7]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: damage(file, 0, b"", cut=1), "13 bytes are no whole number of uint16 tokens"),
        (lambda file: file.write_bytes(b""), "0 bytes are no whole number"),
        (lambda file: damage(file, 2, b"\xff\xff"), "holds id 65535, but the tokenizer has only 100 ids"),
    ],
)
def test_damaged_nanogpt_files(tmp_path, harm, message):
    for name in ("train", "val"):
        np.arange(7, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    harm(tmp_path / "val.bin")
    with pytest.raises(DataError, match=rf"val.bin is not a good token shard: .*{message}.*; make it again"):
        open_nanogpt(tmp_path, 100, tmp_path / "cache")
