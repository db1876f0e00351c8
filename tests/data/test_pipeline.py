"""Documents to shards: in order, in one pass, and the same bytes however often it was interrupted."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Source, text
from data.errors import DataError
from data.pipeline import executor, in_order, write
from data.shards import Writer, open_shards, read_json
from data.tokenizer import Bytes

ROOT = Path(__file__).parents[2]


class Numbered(Source):
    """200 documents, every seventh for validation; `read` counts how often each is read, `fails` ends the stream."""

    def __init__(self, fails=None, documents=200):
        self.fails, self.count, self.read, self.files, self.identity = fails, documents, [], [], []

    def documents(self, position=None):
        for number in range(position or 0, self.count):
            if number == self.fails:
                raise DataError("the network is gone")
            self.read.append(number)
            self.at = number + 1
            yield "val" if number % 7 == 0 else "train", f"document {number}\n" * (number % 9)

    def position(self):
        return self.at


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A record of the progress every 100 tokens, a batch every 60 characters."""
    monkeypatch.setattr("data.pipeline.SYNC_TOKENS", 100)
    monkeypatch.setattr("data.pipeline.PIECE", 60)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.bin")}


def prepared(folder, source, workers=1, **options):
    write(folder, source, Bytes(), workers, shard_tokens=500, **options)
    return files(folder)


@pytest.fixture
def whole(tmp_path):
    return prepared(tmp_path / "whole", Numbered())


def test_one_pass_writes_every_document_in_order(tmp_path, whole):
    source = Numbered()
    folder = tmp_path / "again"
    assert prepared(folder, source) == whole
    assert source.read == list(range(200))
    for split in ("train", "val"):
        tokens = np.concatenate([shard.tokens for shard in open_shards(folder, split, 257)])
        got = [Bytes().decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == 256))][1:]
        assert got == [document for side, document in Numbered().documents() if side == split]
    assert {path.name for path in folder.iterdir()} == {"train", "val"}
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "again"}


class Uneven(Bytes):
    """Now and then slower."""

    def encode(self, text):
        time.sleep(0.002 * (len(text) % 3))
        return super().encode(text)


class Deadly(Bytes):
    """What the system does to a process that takes too much memory."""

    def encode(self, text):
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_end_out_of_order_change_nothing(tmp_path, whole):
    write(tmp_path / "x", Numbered(), Uneven(), 3, shard_tokens=500)
    assert files(tmp_path / "x") == whole


def test_a_worker_that_is_killed_is_a_line(tmp_path):
    with pytest.raises(DataError, match=r"a process that tokenizes was killed, .*: the same command goes on"):
        write(tmp_path / "x", Numbered(), Deadly(), 2)


def test_little_is_in_memory():
    """At most 6 items are taken before the first result is."""
    taken = []

    def items():
        for i in range(100):
            taken.append(i)
            yield (i,)

    with executor(1) as pool:
        for done, (item, result) in enumerate(in_order(pool, lambda i: i * i, items(), ahead=6)):
            assert (item, result) == ((done,), done * done)
            assert len(taken) <= done + 6
    assert len(taken) == 100


def test_what_is_there_is_not_read_again(tmp_path, whole):
    source = Numbered(fails=0)
    assert prepared(tmp_path / "whole", source) == whole


def test_a_lost_split_is_made_again(tmp_path, whole):
    for path in (tmp_path / "whole" / "val").iterdir():
        path.unlink()
    (tmp_path / "whole" / "val").rmdir()
    assert prepared(tmp_path / "whole", Numbered()) == whole


def test_a_broken_stream_goes_on_where_it_was_twice(tmp_path, whole):
    read = []
    for fails in (80, 150, None):
        source = Numbered(fails)
        told = []
        if fails:
            with pytest.raises(DataError, match="the network is gone"):
                prepared(tmp_path / "parts", source, watch=lambda *done, told=told: told.append(done))
            assert not (tmp_path / "parts").exists()
        else:
            assert prepared(tmp_path / "parts", source, watch=lambda *done, told=told: told.append(done)) == whole
        read.append(source.read)
        if len(read) > 1:
            assert told[0][0] == source.read[0] > 40  # documents of the earlier calls are counted, and not read
    assert told[-1] == (200, sum(len(content) - 1024 for content in whole.values()) // 2)
    assert read[0][-1] == 79
    assert read[2][-1] == 199
    assert [path.name for path in (tmp_path / "parts").iterdir() if path.is_file()] == []


def test_nothing_is_left_where_nothing_was_recorded(tmp_path):
    with pytest.raises(DataError):
        prepared(tmp_path / "x", Numbered(fails=2))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_files_that_must_change(tmp_path):
    """Once the line is mended it is another file, and nothing would go on here."""
    lines = [f'{{"text": "document {i}"}}' for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "broken"]))
    with pytest.raises(DataError, match="line 201: not JSON"):
        prepared(tmp_path / "x", text(str(tmp_path / "a.jsonl")))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_empty_split_is_said(tmp_path):
    with pytest.raises(DataError, match="none of the 1 documents fell to the train split: use more text"):
        prepared(tmp_path / "x", Numbered(documents=1))


def test_a_disk_that_fills_up_loses_nothing(tmp_path, whole, monkeypatch):
    def full(self, tokens):
        if self.tokens > 1000:
            raise OSError(28, "No space left on device")
        return append(self, tokens)

    append = Writer.append
    monkeypatch.setattr(Writer, "append", full)
    with pytest.raises(DataError, match=r"cannot be written to data.cache=.*: No space left on device"):
        prepared(tmp_path / "x", Numbered())
    monkeypatch.undo()
    source = Numbered()
    assert prepared(tmp_path / "x", source) == whole
    assert source.read[0] > 20


def test_nowhere_to_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"token shards cannot be written to data.cache=.*: Not a directory"):
        prepared(tmp_path / "file" / "x", Numbered())


CHILD = """
import sys, time
import data.pipeline
from pathlib import Path
from tests.data.test_pipeline import Numbered, Bytes
data.pipeline.SYNC_TOKENS, data.pipeline.PIECE = 100, 60

class Slow(Numbered):
    def documents(self, position=None):
        for document in super().documents(position):
            time.sleep(0.004)
            yield document

data.pipeline.write(Path(sys.argv[1]), Slow(), Bytes(), int(sys.argv[2]), shard_tokens=500)
"""


def child(folder, workers):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, folder, str(workers)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def recorded(folder):
    return read_json(folder.with_name(f"{folder.name}.partial") / "progress.json").get("documents", 0)


def test_killed_again_and_again(tmp_path, whole):
    """SIGKILL at two places, and then the files of one go."""
    folder = tmp_path / "killed"
    for least in (40, 110):
        process = child(folder, workers=2)
        while recorded(folder) < least:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        workers = children(process.pid)
        assert len(workers) >= 2
        process.kill()
        process.wait()
        process.stderr.close()
        assert not folder.exists()
        until = time.monotonic() + 10
        while any(map(alive, workers)):  # they go with it
            assert time.monotonic() < until
            time.sleep(0.01)
    source = Numbered()
    assert prepared(folder, source) == whole
    assert source.read[0] >= 110


def test_two_at_once(tmp_path, whole):
    """The second is refused; one that waits gets the first's result; the lock of a killed one is no lock."""
    folder = tmp_path / "both"
    process = child(folder, workers=1)
    while recorded(folder) < 10:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    with pytest.raises(DataError, match=r"another process is preparing .*both.partial: wait for it, or end it"):
        prepared(folder, Numbered(), wait=False)
    source = Numbered()
    assert prepared(folder, source) == whole
    assert source.read == []
    assert process.wait() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "both"}
    process.communicate()


def test_a_folder_that_was_given_up_is_not_the_lock(tmp_path, whole):
    """The holder removes the folder while another waits: that one begins anew, and with a lock of its own."""
    partial = tmp_path / "x.partial"
    partial.mkdir()
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    thread = threading.Thread(target=prepared, args=(tmp_path / "x", Numbered()))
    thread.start()
    time.sleep(0.1)
    partial.rmdir()
    os.close(handle)
    thread.join(10)
    assert files(tmp_path / "x") == whole
