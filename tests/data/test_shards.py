import hashlib
import io
import json
import os
import shutil

import numpy as np
import pytest

from common.files import read_json
from data.errors import DataError
from data.shards import HEADER_BYTES, SHARD_TOKENS, digest, open_nanogpt_shards, open_shards, read_facts
from data.writer import ChangedShard, Writer

DOCUMENTS = [np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16), np.zeros(0, np.uint16)]
STREAM = [9, 0, 1, 2, 3, 4, 9, 0, 1, 2, 9]  # the tokens of DOCUMENTS with eot=9


def write_split(folder, split, documents, eot, shard_tokens=SHARD_TOKENS):
    """Write the documents, each after an eot, as the shards of `folder/split`."""
    writer = Writer(folder / split, shard_tokens)
    for document in documents:
        writer.append(np.append(np.uint16(eot), document))
    writer.finish()


@pytest.fixture
def folder(tmp_path):
    write_split(tmp_path, "train", DOCUMENTS, eot=9, shard_tokens=4)
    return tmp_path


def shard_bytes(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.bin"))}


def test_shards_have_the_format_of_llm_c(folder):
    """The test reads them like llm.c's dataloader: 256 int32 (20240520, 1, number of tokens, zeros), then uint16."""
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
def test_shards_of_any_size_hold_all_tokens(tmp_path, size):
    write_split(tmp_path, "train", DOCUMENTS, eot=9, shard_tokens=size)
    shards = open_shards(tmp_path, "train", 10)
    assert np.concatenate([shard.tokens for shard in shards]).tolist() == STREAM
    assert {len(shard) for shard in shards[:-1]} <= {size}


@pytest.mark.parametrize("unsynced", [0, 1, 3, 7])
@pytest.mark.parametrize("synced", [0, 2, 4, 5, 10])
def test_a_writer_resumes_after_its_last_sync(tmp_path, synced, unsynced):
    """The first writer syncs `synced` tokens and appends `unsynced` more. The second writer completes the files."""
    tokens = np.arange(11, dtype=np.uint16)
    whole = Writer(tmp_path / "whole", 4)
    whole.append(tokens)
    whole.finish()
    first = Writer(tmp_path / "parts", 4)
    first.append(tokens[:synced])
    state = json.loads(json.dumps(first.sync()))
    first.append(np.full(unsynced, 50, np.uint16))
    first.close()
    second = Writer(tmp_path / "parts", 4, state)
    assert second.tokens == synced
    second.append(tokens[synced:])
    second.finish()
    assert shard_bytes(tmp_path / "parts") == shard_bytes(tmp_path / "whole")
    indices = [read_json(tmp_path / name / "index.json") for name in ("parts", "whole")]
    for index in indices:
        for facts in index.values():
            del facts["mtime_ns"]
    assert indices[0] == indices[1]


def test_a_writer_does_not_resume_a_shard_that_was_cut_short(tmp_path):
    writer = Writer(tmp_path / "train", 4)
    writer.append(np.arange(3, dtype=np.uint16))
    state = writer.sync()
    writer.close()
    damage(tmp_path / "train" / "000000.bin", 0, b"", cut=1)
    with pytest.raises(ChangedShard, match=r"000000.bin became shorter after it was written"):
        Writer(tmp_path / "train", 4, state)


def test_opening_an_unfinished_shard_is_an_error(tmp_path):
    writer = Writer(tmp_path / "train")
    writer.append(DOCUMENTS[0])
    writer.sync()
    writer.close()
    with pytest.raises(DataError, match=r"000000.bin is not a good token shard: magic 0 and version 0"):
        open_shards(tmp_path, "train", 10)


def test_tokens_are_on_the_disk_before_a_file_counts_them(tmp_path, disk):
    """progress.json counts the tokens written by sync(), and index.json counts the tokens of complete shards."""
    writer, shard = Writer(tmp_path, 4), str(tmp_path / "000000.bin")
    writer.append(np.arange(3, dtype=np.uint16))
    writer.sync()
    assert disk == [shard]
    writer.append(np.arange(1, dtype=np.uint16))
    assert disk == [shard, shard]
    writer.finish()
    assert disk[-1] == (disk[-2], str(tmp_path / "index.json"))


def damage(file, at, value, cut=0):
    """Write the bytes `value` at the offset `at` of `file`, and cut `cut` bytes off its end.

    Also makes the modification time 1 s later, because a file system's clock may tick only every 10 ms.
    """
    later = file.stat().st_mtime_ns + 10**9
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    file.write_bytes(data[: len(data) - cut])
    os.utime(file, ns=(later, later))


DAMAGES = [
    (lambda file: damage(file, 0, b"\0"), "magic 20240384 and version 1, not 20240520 and 1"),
    (lambda file: damage(file, 4, b"\7"), "magic 20240520 and version 7"),
    (lambda file: damage(file, 0, b"", cut=1), "1031 bytes, but 4 tokens take 1032"),
    (lambda file: file.write_bytes(file.read_bytes() + b"\0\0"), "1034 bytes, but 4 tokens take 1032"),
    (lambda file: damage(file, 8, b"\xff\xff\xff\x7f"), "1032 bytes, but 2147483647 tokens take 4294968318"),
    (lambda file: file.write_bytes(b"short"), "5 bytes, less than the header's 1024"),
    (lambda file: damage(file, HEADER_BYTES + 2, b"\x0a\0"), "holds id 10, but the tokenizer has only 10 ids"),
    (lambda file: damage(file, HEADER_BYTES + 2, b"\x01"), "its tokens changed after they were written"),
]


@pytest.mark.parametrize(("damage_file", "message"), DAMAGES)
def test_opening_a_damaged_shard_is_an_error(folder, damage_file, message):
    damage_file(folder / "train" / "000001.bin")
    with pytest.raises(DataError, match=rf"000001.bin is not a good token shard: .*{message}.*; delete "):
        open_shards(folder, "train", 10)


@pytest.mark.parametrize(("damage_file", "message"), DAMAGES[:-1])
def test_opening_a_damaged_shard_without_an_index_is_an_error(folder, damage_file, message):
    """The last damage is left out: without an index, a token that changed into another valid token is not noticed."""
    (folder / "train" / "index.json").unlink()
    damage_file(folder / "train" / "000001.bin")
    with pytest.raises(DataError, match=rf"000001.bin is not a good token shard: .*{message}.*; delete "):
        open_shards(folder, "train", 10)


@pytest.mark.parametrize("delete_index", [False, True])
@pytest.mark.parametrize("missing", [["000000.bin"], ["000001.bin"], ["000000.bin", "000001.bin", "000002.bin"]])
def test_a_missing_shard_is_an_error(folder, missing, delete_index):
    for name in missing:
        (folder / "train" / name).unlink()
    if delete_index:
        (folder / "train" / "index.json").unlink()
    with pytest.raises(DataError, match=r"train lacks a token shard; delete .* and prepare the data again"):
        open_shards(folder, "train", 10)


def test_a_missing_last_shard_is_an_error(folder):
    (folder / "train" / "000002.bin").unlink()
    with pytest.raises(DataError, match=r"train lacks a token shard"):
        open_shards(folder, "train", 10)


@pytest.fixture
def tokens_read(monkeypatch):
    """A list that gets the number of tokens of each shard that is read to compute its facts. All count as large."""
    counts = []
    monkeypatch.setattr("data.shards.READ_TOKENS", 1)

    def counting_read_facts(file, count, dtype):
        counts.append(count)
        return read_facts(file, count, dtype)

    monkeypatch.setattr("data.shards.read_facts", counting_read_facts)
    return counts


def test_a_shard_is_read_only_when_the_index_does_not_match_its_file(folder, tmp_path, tokens_read):
    """A shard is read once after a copy, and once after its index was deleted. A shard just written is not read."""
    original_digest = digest(open_shards(folder, "train", 10))
    assert tokens_read == []
    copy = tmp_path / "copy"
    shutil.copytree(folder / "train", copy / "train", copy_function=shutil.copyfile)
    for file in (copy / "train").glob("*.bin"):
        os.utime(file, ns=(10**18, 10**18))
    for _ in range(2):
        assert digest(open_shards(copy, "train", 10)) == original_digest
        assert tokens_read == [4, 4, 3]
    (copy / "train" / "index.json").unlink()
    for _ in range(2):
        assert digest(open_shards(copy, "train", 10)) == original_digest
        assert tokens_read == [4, 4, 3] * 2


def test_verify_reads_shards_whose_size_and_time_are_those_of_the_index(folder, tokens_read):
    file = folder / "train" / "000001.bin"
    time = file.stat().st_mtime_ns
    damage(file, HEADER_BYTES + 2, b"\x01")
    os.utime(file, ns=(time, time))
    assert len(open_shards(folder, "train", 10)) == 3
    assert tokens_read == []
    with pytest.raises(DataError, match="its tokens changed after they were written"):
        open_shards(folder, "train", 10, verify=True)


def test_facts_are_of_all_parts_of_a_file(monkeypatch):
    monkeypatch.setattr("data.shards.READ_TOKENS", 2)
    tokens = np.array([7, 1, 2], np.uint16)
    facts = {"tokens": 3, "sha256": hashlib.sha256(tokens).hexdigest(), "largest": 7}
    assert read_facts(io.BytesIO(tokens.tobytes()), 3) == facts


def test_the_digest_depends_on_the_tokens_and_the_shard_size(tmp_path):
    for name, documents, size in (("a", DOCUMENTS, 4), ("b", DOCUMENTS, 5), ("c", DOCUMENTS[:2], 4)):
        write_split(tmp_path, name, documents, eot=9, shard_tokens=size)
    shards = {name: open_shards(tmp_path, name, 10) for name in "abc"}
    assert len({digest(split) for split in shards.values()}) == 3
    hashes = [hashlib.sha256(bytes(shard.tokens)).hexdigest() for shard in shards["a"]]  # computed without the index
    assert digest(shards["a"]) == hashlib.sha256("".join(hashes).encode()).hexdigest()


def test_shards_open_when_the_index_cannot_be_written(folder, tokens_read, monkeypatch):
    """Without an index, each call reads the shards again."""

    def fail(path, content):
        raise OSError("read-only")

    (folder / "train" / "index.json").unlink()
    monkeypatch.setattr("data.shards.write_json", fail)
    for _ in range(2):
        assert len(open_shards(folder, "train", 10)) == 3
    assert tokens_read == [4, 4, 3] * 2


def test_nanogpt_files_are_opened_without_a_copy(tmp_path, tokens_read):
    """The files have no header and are read once. The user may change a file, so a changed file is not an error."""
    for name, count in (("train", 100), ("val", 7)):
        np.arange(count, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    for _ in range(2):
        train, val = open_nanogpt_shards(tmp_path, 100, tmp_path / "cache")
        assert train[0].tokens.tolist() == list(range(100))
        assert val[0].tokens.tolist() == list(range(7))
        assert tokens_read == [100, 7]
    damage(tmp_path / "val.bin", 0, b"\x07")
    train, changed = open_nanogpt_shards(tmp_path, 100, tmp_path / "cache")
    assert changed[0].tokens[0] == 7
    assert digest(changed) != digest(val)
    assert tokens_read == [100, 7, 7]
    stat = (tmp_path / "val.bin").stat()
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "val.bin")
    os.utime(tmp_path / "val.bin", ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    assert len(open_nanogpt_shards(tmp_path, 100, tmp_path / "cache")[1][0]) == 9


IDS = np.arange(7, dtype=np.uint16)


@pytest.mark.parametrize(
    ("damage_file", "message"),
    [
        (lambda file: damage(file, 0, b"", cut=1), "13 bytes are not a whole number of uint16 tokens"),
        (lambda file: file.write_bytes(b""), "0 bytes are not a whole number"),
        (lambda file: damage(file, 2, b"\xff\xff"), "holds id 65535, but the tokenizer has only 100 ids"),
        (lambda file: file.write_bytes(llmc_header(20240520, 8) + IDS.tobytes()), "1038 bytes, but 8 tokens take 1040"),
    ],
)
def test_a_damaged_nanogpt_file_is_an_error(tmp_path, damage_file, message):
    for name in ("train", "val"):
        IDS.tofile(tmp_path / f"{name}.bin")
    damage_file(tmp_path / "val.bin")
    with pytest.raises(
        DataError,
        match=rf"val.bin is not a good token shard: .*{message}.*; write it again, as uint16, as nanoGPT's prepare.py",
    ):
        open_nanogpt_shards(tmp_path, 100, tmp_path / "cache")


def llmc_header(magic, count, version=1):
    """Return the header of llm.c and modded-nanogpt."""
    return np.array([magic, version, count, *[0] * 253], np.int32).tobytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64])
@pytest.mark.parametrize("count", [8, 100, 200_000])
def test_a_nanogpt_file_of_another_dtype_is_an_error(tmp_path, dtype, count):
    """It would be read as ids with zeros between them."""
    ids = np.random.default_rng(0).integers(0, 50257, count).astype(np.uint16)
    if dtype == np.int16:
        ids &= 0x7FFF
    for name in ("train", "val"):
        ids.astype(dtype).tofile(tmp_path / f"{name}.bin")
    if np.dtype(dtype).itemsize == 2:
        assert open_nanogpt_shards(tmp_path, 50257, tmp_path / "cache")[0][0].tokens.tolist() == ids.tolist()
        return
    with pytest.raises(DataError, match=r"train.bin is not a good token shard: .* so its ids have 4 or 8 bytes"):
        open_nanogpt_shards(tmp_path, 50257, tmp_path / "cache")


def test_a_numpy_file_of_wider_ids_is_an_error(tmp_path):
    """Its header is not zero."""
    for name in ("train", "val"):
        with (tmp_path / f"{name}.bin").open("wb") as file:  # np.save() adds .npy to a path
            np.save(file, np.arange(100))
    with pytest.raises(DataError, match=r"train.bin is not a good token shard: .* so its ids have 4 or 8 bytes"):
        open_nanogpt_shards(tmp_path, 50257, tmp_path / "cache")


@pytest.mark.parametrize("ids", [np.zeros(100), np.arange(100) % 2, np.arange(100) % 4, np.arange(100)[::-1]])
def test_a_nanogpt_file_with_many_zeros_is_none_of_another_dtype(tmp_path, ids):
    for name in ("train", "val"):
        ids.astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    assert open_nanogpt_shards(tmp_path, 100, tmp_path / "cache")[0][0].tokens.tolist() == ids.tolist()


def test_a_nanogpt_file_with_the_header_of_llmc_is_read_by_it(tmp_path):
    """The ids are the same as without the header, and so is the hash."""
    for folder, header in (("plain", b""), ("llmc", llmc_header(20240520, 7))):
        (tmp_path / folder).mkdir()
        for name in ("train", "val"):
            (tmp_path / folder / f"{name}.bin").write_bytes(header + IDS.tobytes())
    (plain, _), (llmc, _) = (
        open_nanogpt_shards(tmp_path / name, 100, tmp_path / "cache") for name in ("plain", "llmc")
    )
    assert llmc[0].tokens.tolist() == list(range(7))
    assert digest(llmc) == digest(plain)


@pytest.mark.parametrize("n_vocab", [128_256, 100])
def test_the_header_of_llmc_for_llama3_says_that_the_ids_are_uint32(tmp_path, n_vocab):
    ids = np.array([1, 2, n_vocab - 1], np.uint32)
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes(llmc_header(20240801, 3, version=7) + ids.tobytes())
    [train], _ = open_nanogpt_shards(tmp_path, n_vocab, tmp_path / "cache")
    assert (train.tokens.dtype, train.tokens.tolist()) == (np.uint32, ids.tolist())


def test_a_nanogpt_file_of_a_large_vocabulary_needs_a_header(tmp_path):
    """Ids of 65,536 and more would be read as two ids each. uint16 with llm.c's header is sure, so it is read."""
    for name in ("train", "val"):
        np.array([1, 2, 128_255] * 9, np.uint32).tofile(tmp_path / f"{name}.bin")
    message = "without a header its ids are uint16, but the tokenizer has 128256 ids; write it again, as uint32 after"
    with pytest.raises(DataError, match=message):
        open_nanogpt_shards(tmp_path, 128_256, tmp_path / "cache")
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes(llmc_header(20240520, 7) + IDS.tobytes())
    assert open_nanogpt_shards(tmp_path, 128_256, tmp_path / "cache")[0][0].tokens.tolist() == IDS.tolist()
