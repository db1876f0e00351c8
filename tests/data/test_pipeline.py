"""Documents become shards in order and in one pass. Interruptions do not change the bytes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Document, Source, text_source
from data.errors import DataError
from data.pipeline import encode_in_order, worker_pool, write_shards
from data.progress import Progress
from data.shards import open_shards
from data.tokenizer import Bytes
from data.writer import Writer
from tests.data.test_corpus import texts_of

ROOT = Path(__file__).parents[2]


class Numbered(Source):
    """200 numbered documents. Every seventh document is for validation.

    `read` lists the numbers of the documents that were read. Document number `fails_at` raises DataError.
    """

    def __init__(self, fails_at=None, documents=200):
        self.fails_at, self.count = fails_at, documents
        self.read, self.files, self.identity = [], [], []

    def documents(self, position=None):
        for number in range(position or 0, self.count):
            if number == self.fails_at:
                raise DataError("the network is gone")
            self.read.append(number)
            self.next_number = number + 1
            yield Document("val" if number % 7 == 0 else "train", f"document {number}\n" * (number % 9))

    def position(self):
        return self.next_number


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Record the progress every 100 tokens, and tokenize chunks of 60 characters."""
    monkeypatch.setattr("data.pipeline.RECORD_EVERY_TOKENS", 100)
    monkeypatch.setattr("data.pipeline.PIECE_CHARACTERS", 60)


def shard_bytes(folder):
    """Return {path below `folder`: content} of each shard."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.bin")}


def recorded_documents(folder):
    """Return the number of documents that an unfinished preparation recorded."""
    return Progress(folder.with_name(f"{folder.name}.partial")).last["documents"]


def visible_names(folder):
    """Return the names in a folder without the lock files, which are hidden and stay."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def prepare(folder, source, **options):
    """Write the shards of `source` with one worker, and return their contents by path."""
    write_shards(folder, source, Bytes(), workers=1, shard_tokens=500, **options)
    return shard_bytes(folder)


@pytest.fixture
def expected(tmp_path):
    """The contents of the shards that one uninterrupted process writes."""
    return prepare(tmp_path / "expected", Numbered())


def test_one_pass_writes_every_document_in_order(tmp_path, expected):
    source = Numbered()
    folder = tmp_path / "again"
    assert prepare(folder, source) == expected
    assert source.read == list(range(200))
    for split in ("train", "val"):
        tokens = np.concatenate([shard.tokens for shard in open_shards(folder, split, 257)])
        documents = np.split(tokens, np.flatnonzero(tokens == Bytes.eot))
        texts = [Bytes().decode(document.tolist()) for document in documents]
        assert texts[1:] == texts_of(Numbered(), split)
    assert {path.name for path in folder.iterdir()} == {"train", "val"}
    assert visible_names(tmp_path) == {"expected", "again"}


class UnevenBytes(Bytes):
    """encode() takes 0, 2 or 4 ms, depending on the text's length."""

    def encode(self, text):
        time.sleep(0.002 * (len(text) % 3))
        return super().encode(text)


class KilledBytes(Bytes):
    """encode() kills its process, as the operating system does if the memory is full."""

    def encode(self, text):
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_finish_out_of_order_give_the_same_shards(tmp_path, expected):
    write_shards(tmp_path / "x", Numbered(), UnevenBytes(), workers=3, shard_tokens=500)
    assert shard_bytes(tmp_path / "x") == expected


def test_a_killed_worker_is_an_error(tmp_path):
    message = r"a process that tokenizes was killed, .*: run the same command again to resume"
    with pytest.raises(DataError, match=message):
        write_shards(tmp_path / "x", Numbered(), KilledBytes(), workers=2)


def test_encode_in_order_holds_few_chunks_in_memory():
    """At most 6 chunks are read and not yet yielded. Here a chunk is a number i, and its position is -i."""
    chunks_read = []

    def chunks():
        for i in range(100):
            chunks_read.append(i)
            yield i, -i

    with worker_pool(1) as pool:
        results = encode_in_order(pool, lambda i: i * i, chunks(), ahead=6)
        for i, result in enumerate(results):
            assert result == (i, -i, i * i)
            assert len(chunks_read) <= i + 6
    assert len(chunks_read) == 100


def test_nothing_is_read_when_the_shards_exist(tmp_path, expected):
    source = Numbered(fails_at=0)
    assert prepare(tmp_path / "expected", source) == expected


def test_a_deleted_split_is_written_again(tmp_path, expected):
    for path in (tmp_path / "expected" / "val").iterdir():
        path.unlink()
    (tmp_path / "expected" / "val").rmdir()
    assert prepare(tmp_path / "expected", Numbered()) == expected


class Watch:
    """Records the numbers of documents and tokens of each call of watch()."""

    def __init__(self):
        self.documents, self.tokens = [], []

    def __call__(self, documents, tokens):
        self.documents.append(documents)
        self.tokens.append(tokens)


def test_a_stream_that_fails_twice_resumes_twice(tmp_path, expected):
    folder = tmp_path / "parts"
    first, second, third = Numbered(fails_at=80), Numbered(fails_at=150), Numbered()
    for source in (first, second):
        watch = Watch()
        with pytest.raises(DataError, match="the network is gone"):
            prepare(folder, source, watch=watch)
        assert not folder.exists()
    assert watch.documents[0] == second.read[0] > 40  # watch() counts the documents of the first call too
    watch = Watch()
    assert prepare(folder, third, watch=watch) == expected
    assert watch.documents[0] == third.read[0] > 40
    assert watch.documents[-1] == 200
    assert watch.tokens[-1] == sum(len(content) - 1024 for content in expected.values()) // 2
    assert first.read[-1] == 79
    assert third.read[-1] == 199
    assert [path.name for path in folder.iterdir() if path.is_file()] == []


def test_a_text_file_that_is_cut_is_one_document(tmp_path):
    """Each of its two parts opens with an eot in its own split."""
    for name, lines in (("a", 20), ("b", 30)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}, line {number}\n" for number in range(lines)))
    watch = Watch()
    prepare(tmp_path / "x", text_source(str(tmp_path / "*.txt")), watch=watch)
    assert watch.documents[-1] == 2
    for split in ("train", "val"):
        [shard] = open_shards(tmp_path / "x", split, 257)
        assert np.count_nonzero(shard.tokens == Bytes.eot) == 2


def test_a_failure_before_the_first_record_leaves_only_the_lock_file(tmp_path):
    with pytest.raises(DataError):
        prepare(tmp_path / "x", Numbered(fails_at=2))
    assert [path.name for path in tmp_path.iterdir()] == [".x.partial.lock"]


def test_a_broken_local_file_leaves_no_partial_folder(tmp_path):
    """The shards of the corrected file get another folder, so no later call resumes from this one."""
    lines = [f'{{"text": "document {i}"}}' for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "broken"]))
    with pytest.raises(DataError, match="line 201: not JSON"):
        prepare(tmp_path / "x", text_source(str(tmp_path / "a.jsonl")))
    assert visible_names(tmp_path) == {"a.jsonl"}


def test_an_empty_split_is_an_error(tmp_path):
    with pytest.raises(DataError, match="none of the 1 documents is in the train split: use more text"):
        prepare(tmp_path / "x", Numbered(documents=1))


def test_a_text_without_a_document_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"there is no document in data.path: add text"):
        prepare(tmp_path / "x", Numbered(documents=0))


def test_a_preparation_resumes_after_the_disk_was_full(tmp_path, expected, monkeypatch):
    append = Writer.append

    def append_to_full_disk(self, tokens):
        if self.tokens > 1000:
            raise OSError(28, "No space left on device")
        append(self, tokens)

    monkeypatch.setattr(Writer, "append", append_to_full_disk)
    with pytest.raises(DataError, match=r"cannot be written to data.cache=.*: No space left on device"):
        prepare(tmp_path / "x", Numbered())
    monkeypatch.undo()
    source = Numbered()
    assert prepare(tmp_path / "x", source) == expected
    assert source.read[0] > 20


def test_a_cache_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"token shards cannot be written to data.cache=.*: Not a directory"):
        prepare(tmp_path / "file" / "x", Numbered())


CHILD = """
import sys, time
from pathlib import Path
import data.pipeline
from tests.data.test_pipeline import Bytes, Numbered

folder = Path(sys.argv[1])
workers, record_every_tokens, fails_at = map(int, sys.argv[2:])
data.pipeline.RECORD_EVERY_TOKENS = record_every_tokens
data.pipeline.PIECE_CHARACTERS = 60

class SlowNumbered(Numbered):
    def documents(self, position=None):
        for document in super().documents(position):
            time.sleep(0.004)
            yield document

data.pipeline.write_shards(folder, SlowNumbered(fails_at), Bytes(), workers, shard_tokens=500)
"""


def start_child(folder, workers=1, record_every_tokens=100, fails_at=-1):
    """Start another process that prepares `folder`, which takes about 1 s. By default, no document fails."""
    arguments = [folder, workers, record_every_tokens, fails_at]
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_until(condition, process):
    """Wait until `condition()` is true. Fails if `process` ends first."""
    while not condition():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


def child_ids(pid):
    """Return the ids of the processes that process `pid` started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid):
    """Return whether process `pid` runs. A zombie, which has ended, does not count."""
    try:
        _, fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
        return fields.split()[0] != "Z"
    except OSError:
        return False


def test_a_preparation_that_is_killed_twice_gives_the_same_bytes(tmp_path, expected):
    """The workers end when their parent process is killed. The next process resumes."""
    folder = tmp_path / "killed"
    for documents in (40, 110):
        process = start_child(folder, workers=2)
        wait_until(lambda at_least=documents: recorded_documents(folder) >= at_least, process)
        workers = child_ids(process.pid)
        assert len(workers) >= 2
        process.kill()
        process.communicate()
        assert not folder.exists()
        deadline = time.monotonic() + 60
        while any(map(is_alive, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    source = Numbered()
    assert prepare(folder, source) == expected
    assert source.read[0] >= 110


def test_a_second_process_raises_an_error_or_waits_for_the_shards(tmp_path, expected, capsys):
    folder = tmp_path / "both"
    process = start_child(folder)
    wait_until(lambda: recorded_documents(folder) >= 10, process)
    with pytest.raises(DataError, match=r"another process is preparing .*both.partial: wait for it, or end it"):
        prepare(folder, Numbered(), wait=False)
    assert capsys.readouterr().err == ""
    source = Numbered()
    assert prepare(folder, source) == expected
    assert source.read == []
    assert capsys.readouterr().err == f"waiting for another process, which is preparing {folder}.partial\n"
    process.communicate()
    assert process.returncode == 0
    assert visible_names(tmp_path) == {"expected", "both"}


def test_a_waiting_process_starts_over_when_the_other_process_fails(tmp_path, expected, capsys):
    """The other process fails before it records any progress, and deletes its partial folder."""
    folder = tmp_path / "failed"
    process = start_child(folder, record_every_tokens=10**6, fails_at=100)
    wait_until((tmp_path / "failed.partial").exists, process)
    source = Numbered()
    assert prepare(folder, source) == expected
    assert capsys.readouterr().err.startswith("waiting for another process")
    assert source.read == list(range(200))
    assert "the network is gone" in process.communicate()[1]
    assert process.returncode == 1


def test_a_waiting_process_resumes_when_the_other_process_is_killed(tmp_path, expected, monkeypatch):
    folder = tmp_path / "killed"
    process = start_child(folder)
    messages = []

    def kill_other_process(message, file):
        messages.append(message)
        process.kill()

    monkeypatch.setattr("data.pipeline.print", kill_other_process, raising=False)
    wait_until(lambda: recorded_documents(folder) >= 40, process)
    source = Numbered()
    assert prepare(folder, source) == expected
    assert messages == [f"waiting for another process, which is preparing {folder}.partial"]
    assert source.read[0] >= 40
    process.communicate()
    assert process.returncode == -signal.SIGKILL
