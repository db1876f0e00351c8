"""A preparation that is killed, that cannot write or read, or whose files change on the disk.

The next call gives the bytes of an undisturbed preparation, or one line. Nothing is deleted that may be good.
"""

import errno
import os
import resource
import shutil
import signal
import sys
import traceback

import pytest

from common.files import read_json
from data import source_and_folder
from data.corpus import text_source
from data.errors import DataError
from data.pipeline import write_shards
from data.shards import open_shards
from data.tokenizer import Bytes
from tests.data.test_dataset import data_config
from tests.data.test_pipeline import prepare, shard_bytes, small_chunks  # noqa: F401 (a fixture)

ERRORS = [errno.EACCES, errno.EIO, errno.EMFILE]
KILL = 0


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """An fsync takes 5 ms. A kill of the process loses no write, also without it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def rows(tmp_path):
    """A text of 120 documents in two files."""
    (tmp_path / "text").mkdir()
    for name, first in (("a", 0), ("b", 60)):
        lines = (f'{{"text": "document {i}: {"x" * (i % 9)}"}}\n' for i in range(first, first + 60))
        (tmp_path / "text" / f"{name}.jsonl").write_text("".join(lines))
    return str(tmp_path / "text")


@pytest.fixture
def expected(tmp_path, rows):
    """The shards that an undisturbed preparation writes."""
    return prepare(tmp_path / "expected", text_source(rows))


@pytest.fixture
def unfinished(tmp_path, rows, expected):
    """A preparation that failed near its end. Its folder has complete shards, open ones and records."""
    source = text_source(rows)
    documents = source.documents

    def fail_late(position):
        for number, document in enumerate(documents(position)):
            if number == 110:
                raise DataError("the network is gone")
            yield document

    source.documents = fail_late
    with pytest.raises(DataError, match="the network is gone"):
        prepare(tmp_path / "x", source)
    names = {str(path.relative_to(tmp_path / "x.partial")) for path in (tmp_path / "x.partial").rglob("*.*")}
    assert names >= {"progress.json", "train/000000.bin", "train/000001.bin", "train/000002.bin", "val/000000.bin"}
    return tmp_path / "x.partial"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_complete(folder, expected):
    """The shards are the expected ones, and no other file is left."""
    assert shard_bytes(folder) == expected
    assert contents(folder).keys() == {*expected, "train/index.json", "val/index.json"}
    assert not folder.with_name(f"{folder.name}.partial").exists()


def damages(content, places):
    """Yield (place, content) of a damaged file: a bit at this place is different, or the file is cut or longer (-1)."""
    for place in places:
        yield place, content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
    yield -1, content[: len(content) // 2]
    yield -1, b""
    yield -1, content + b"\7\7"


def check_damages(unfinished, rows, expected, capsys, places):
    """Damage one file at a time. A warning names what is not taken over; other damages are overwritten."""
    folder, good, last_words = unfinished.with_name("x"), contents(unfinished), set()
    progress = read_json(unfinished / "progress.json")
    written = {"progress.json": range(len(good["progress.json"]))}  # what must be unchanged in each file
    for split, state in progress["records"][-1]["splits"].items():
        written |= {f"{split}/{name}": range(len(good[f"{split}/{name}"])) for name in progress["index"][split]}
        written[f"{split}/{state['shards']:06}.bin"] = range(1024, 1024 + 2 * state["open"]["tokens"])
    for name in good:
        for place, content in damages(good[name], places(len(good[name]))):
            shutil.rmtree(folder, ignore_errors=True)
            for other, other_content in good.items():
                (unfinished / other).parent.mkdir(parents=True, exist_ok=True)
                (unfinished / other).write_bytes(content if other == name else other_content)
            prepare(folder, text_source(rows))
            check_complete(folder, expected)
            warnings = capsys.readouterr().err.splitlines()
            assert len(warnings) == (place in written[name]) or place == -1, (name, place)
            last_words.update(warning.partition("the preparation ")[2][:6] for warning in warnings)
    assert last_words == {"starts", "resume"}


def test_a_damaged_unfinished_preparation_gives_the_same_bytes(unfinished, rows, expected, capsys):
    check_damages(unfinished, rows, expected, capsys, lambda size: [8, 700, 1024, 1025, 1100, size // 2, size - 1])


@pytest.mark.exhaustive
def test_any_flip_in_an_unfinished_preparation_gives_the_same_bytes(unfinished, rows, expected, capsys):
    """At every 31st byte."""
    check_damages(unfinished, rows, expected, capsys, lambda size: range(0, size, 31))


def test_a_changed_shard_costs_only_what_was_written_after_it(unfinished, rows, expected, capsys):
    """One flipped bit in the second shard: the first shard's documents are not read again."""
    for name in ("train/000001.bin", "train/000002.bin", "val/000000.bin"):
        shutil.copytree(unfinished, unfinished.with_name("copy.partial"))
        path = unfinished.with_name("copy.partial") / name
        path.write_bytes(path.read_bytes()[:1030] + b"\0\1" + path.read_bytes()[1032:])
        watched = []
        prepare(unfinished.with_name("copy"), text_source(rows), watch=lambda *counts: watched.append(counts))  # noqa: B023
        check_complete(unfinished.with_name("copy"), expected)
        shutil.rmtree(unfinished.with_name("copy"))
        first_documents, first_tokens = watched[0]
        if name.startswith("train"):
            assert first_tokens > 300
        [warning] = capsys.readouterr().err.splitlines()
        assert "changed after it was written" in warning
        resumes = f"resumes after {first_documents} documents" if first_documents else "starts again"
        assert warning.endswith(f": the preparation {resumes}")


def test_a_deleted_shard_is_written_again(unfinished, rows, expected, capsys):
    for name in ("train/000000.bin", "train/000002.bin", "val/000000.bin"):
        shutil.copytree(unfinished, unfinished.with_name("copy.partial"))
        (unfinished.with_name("copy.partial") / name).unlink()
        prepare(unfinished.with_name("copy"), text_source(rows))
        check_complete(unfinished.with_name("copy"), expected)
        shutil.rmtree(unfinished.with_name("copy"))
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("number", ERRORS)
def test_a_file_that_cannot_be_read_is_an_error_and_deletes_nothing(unfinished, rows, expected, monkeypatch, number):
    """Each file of the unfinished preparation, and the text behind its last record."""
    good, folder, last_file = contents(unfinished), unfinished.with_name("x"), text_source(rows).files[-1]
    for path in [last_file, *(unfinished / name for name in good)]:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse(os.open, path, number))
            with pytest.raises(DataError, match=f"{path} cannot be read: {os.strerror(number)}$"):
                prepare(folder, text_source(rows))
        # What was written behind the last record may be gone
        assert all(good[name].startswith(content) for name, content in contents(unfinished).items())
        assert contents(unfinished).keys() == good.keys()
    first = []
    prepare(folder, text_source(rows), watch=lambda documents, tokens: first.append(documents))
    assert first[0] > 90
    check_complete(folder, expected)


def refuse(function, refused, number):
    """Return the function of `os`, with an error for one path."""

    def refusing(path, *arguments, **more):
        if path == str(refused) or path == refused:
            raise OSError(number, os.strerror(number), str(path))
        return function(path, *arguments, **more)

    return refusing


def test_a_complete_data_set_that_cannot_be_read_is_not_written_again(tmp_path, rows, expected, monkeypatch):
    folder = tmp_path / "expected"
    before = contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse(os.stat, folder / "val", errno.EACCES))
        with pytest.raises(DataError, match="expected cannot be read: Permission denied"):
            prepare(folder, text_source(rows))
    assert contents(folder) == before


def audited(name):
    """Return the function of `os` with an audit event, as most of its functions have."""
    function = getattr(os, name)

    def report(*arguments, **more):
        sys.audit(f"os.{name}", *arguments)
        return function(*arguments, **more)

    return report


def in_fork(folder, rows, fault=None, at=-1, limit=None):
    """Prepare `folder` in a fork, in which `fault` (KILL or an error number) happens at the file operation `at`.

    `limit` is the most bytes of a file. Returns (status, what it printed): the status is the number of operations if
    nothing failed, -1 after a DataError, -2 after another exception, and -9 after a kill.
    """
    config = data_config(folder.parent, path=rows)
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        answer, count = b"", 0
        try:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            armed = True

            def watch(event, arguments):
                nonlocal count
                if not armed or not (event == "open" or event.startswith(("os.", "fcntl."))):
                    return
                count += 1
                if count - 1 == at:
                    if fault == KILL:
                        os.kill(os.getpid(), signal.SIGKILL)
                    path = [str(path) for path in arguments[:1] if isinstance(path, str | os.PathLike)]
                    raise OSError(fault, os.strerror(fault), *path)

            for name in ("fsync", "stat", "lstat", "fstat"):  # Python reports the others by itself
                setattr(os, name, audited(name))
            sys.addaudithook(watch)
            write_shards(folder, source_and_folder(config, Bytes())[0], Bytes(), workers=1, shard_tokens=500)
            for split in ("train", "val"):
                open_shards(folder, split, Bytes.n_vocab)
            armed = False
            answer = f"0 {count}".encode()
        except DataError as error:
            armed = False
            answer = f"-1 {error}".encode()
        except BaseException:
            armed = False
            answer = f"-2 {traceback.format_exc()}".encode()
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        answer = file.read().decode()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status), answer
    code, _, rest = answer.partition(" ")
    return int(code), rest


def begin(folder, unfinished):
    if unfinished:
        shutil.copytree(unfinished, folder)


def disturb(tmp_path, rows, expected, places, faults, unfinished=None):
    """Every fault at every place, also while an `unfinished` preparation goes on. Returns the number of each status."""
    statuses = {}
    begin(tmp_path / "count.partial", unfinished)
    code, count = in_fork(tmp_path / "count", rows)
    assert code == 0, count
    for fault in faults:
        for at in places(int(count)):
            folder = tmp_path / "x"
            begin(tmp_path / "x.partial", unfinished)
            status, printed = in_fork(folder, rows, fault, at)
            statuses[status] = statuses.get(status, 0) + 1
            assert status != -2, printed
            assert "\n" not in printed
            prepare(folder, text_source(rows))
            check_complete(folder, expected)
            assert {path.name for path in tmp_path.iterdir() if path.name not in ("text", "expected", "count")} <= {
                "x",
                *(f".{name}.partial.lock" for name in ("x", "expected", "count")),
            }
            shutil.rmtree(folder)
    return statuses


def test_a_preparation_that_is_killed_at_an_operation_goes_on(tmp_path, rows, expected):
    statuses = disturb(tmp_path, rows, expected, lambda count: range(0, count, count // 25), [KILL])
    assert statuses[-9] >= 24


def test_a_preparation_that_fails_at_an_operation_goes_on(tmp_path, rows, expected):
    statuses = disturb(tmp_path, rows, expected, lambda count: range(3, count, count // 8), [errno.ENOSPC, *ERRORS])
    assert statuses[-1] >= 20


@pytest.mark.parametrize("fault", [KILL, errno.EIO])
def test_an_unfinished_preparation_that_is_disturbed_goes_on(tmp_path, rows, expected, unfinished, fault):
    """All its operations are few: it begins with the check of what was written."""
    kept = unfinished.rename(tmp_path / "text" / "kept")
    statuses = disturb(tmp_path, rows, expected, lambda count: range(0, count, 5), [fault], kept)
    assert sum(statuses.values()) - statuses.get(0, 0) > 10


@pytest.mark.exhaustive
def test_a_preparation_is_killed_at_each_third_operation(tmp_path, rows, expected):
    """All operations would take 28 s on one core. Another test raises errors, at about eight operations."""
    disturb(tmp_path, rows, expected, lambda count: range(0, count, 3), [KILL])


def test_a_preparation_goes_on_after_a_full_disk(tmp_path, rows, expected):
    """No file may have more bytes than the limit."""
    for limit in range(0, 2100, 150):
        status, printed = in_fork(tmp_path / "x", rows, limit=limit)
        assert status == -1, printed
        assert ": File too large" in printed
        assert "\n" not in printed
    prepare(tmp_path / "x", text_source(rows))
    check_complete(tmp_path / "x", expected)
