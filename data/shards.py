"""Token shards in llm.c's format: 256 int32 (magic, version, number of tokens, zeros), then the tokens as uint16.

A split is a folder of them, `000000.bin` and on, each of SHARD_TOKENS but the last. Beside them `index.json` says what
every shard holds (tokens, SHA-256 of the tokens, largest id) and which size and time of change the file had then. While
these two agree, a shard is opened without being read: 20 GB take milliseconds. Where they do not (the files were
copied), it is read once and compared. nanoGPT's .bin files are the same without a header, and without our index.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data.errors import DataError

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
SHARD_TOKENS = 100_000_000  # 200 MB a file
INDEX = "index.json"
READ_TOKENS = 1 << 24  # verified at a time: 32 MiB


class Shard:
    """One verified file; `tokens` is a read-only uint16 memory map, `facts` what an index keeps of it.

    `known` are its facts from an index, if there is one; `remedy` ends the error's line. DataError: not a shard, not
    the tokens that `known` tells of, or ids from n_vocab up.
    """

    def __init__(self, path: Path, n_vocab: int, known: dict | None, remedy: str, header_bytes: int = HEADER_BYTES):
        self.path, self.remedy = path, remedy
        try:
            with path.open("rb") as file:
                self.opened = stamp(os.fstat(file.fileno()))
                count = self._count(file.read(header_bytes), header_bytes)
                self.tokens = np.memmap(file, np.uint16, "r", offset=header_bytes, shape=(count,))
        except OSError as error:
            raise self._damaged(error.strerror) from None
        size, mtime, _ = self.opened
        trusted = known is not None and (known["size"], known["mtime_ns"]) == (size, mtime)
        self.facts = known if trusted else {**read_through(self.tokens), "size": size, "mtime_ns": mtime}
        if self.facts["largest"] >= n_vocab:
            raise self._damaged(f"it holds id {self.facts['largest']}, but the tokenizer has only {n_vocab} ids")
        if known is not None and known["sha256"] != self.facts["sha256"]:
            raise self._damaged("its tokens are not those that were written (their SHA-256 is another)")

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self) -> None:
        """DataError: the file is no longer the one that was opened. A stat, about 1 us; call it before reading, since
        a read beyond the end of a file that was cut short kills the process (SIGBUS)."""
        try:
            now = stamp(self.path.stat())
        except OSError as error:
            raise self._changed(error.strerror) from None
        if now != self.opened:
            raise self._changed(f"{now[0]} bytes, {self.opened[0]} before" if now[0] != self.opened[0] else "rewritten")

    def _count(self, header: bytes, header_bytes: int) -> int:
        """The number of tokens, from the header (or without one, from the size)."""
        size = self.opened[0]
        if not header_bytes:
            if size < 2 or size % 2:
                raise self._damaged(f"{size} bytes are no whole number of uint16 tokens")
            return size // 2
        if size < header_bytes:
            raise self._damaged(f"{size} bytes, less than the header's {header_bytes}")
        magic, version, count = np.frombuffer(header, np.int32, 3).tolist()
        if (magic, version) != (MAGIC, VERSION):
            raise self._damaged(f"magic {magic} and version {version}, not {MAGIC} and {VERSION}")
        if count < 1 or size != header_bytes + 2 * count:
            raise self._damaged(f"{size} bytes, but {count} tokens take {header_bytes + 2 * count}")
        return count

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.path} is not a good token shard: {why}; {self.remedy}")

    def _changed(self, what: str) -> DataError:
        return DataError(
            f"{self.path} changed while it was being read ({what}): the batches would no longer be those of this data; "
            "put the file back as it was and resume, and let nothing write to it during a run"
        )


def stamp(stat: os.stat_result) -> tuple[int, int, int]:
    """What changes when a file is written to or replaced: (bytes, time of change in ns, inode)."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def read_through(tokens: np.ndarray) -> dict:
    """The facts that take a reading: tokens, sha256 (of their bytes, without the header) and the largest id."""
    hashed, largest = hashlib.sha256(), 0
    for start in range(0, len(tokens), READ_TOKENS):
        part = tokens[start : start + READ_TOKENS]
        hashed.update(part)
        largest = max(largest, int(part.max()))
    return {"tokens": len(tokens), "sha256": hashed.hexdigest(), "largest": largest}


def open_shards(folder: Path, split: str, n_vocab: int) -> list[Shard]:
    """The shards of `folder/split`, in order, each verified. DataError: there is none, one is missing, or damaged."""
    paths = sorted((folder / split).glob("*.bin"))
    names = [path.name for path in paths]
    remedy = f"delete {folder} to have it made again"
    index = folder / split / INDEX
    known = read_json(index)
    if not paths or names != [shard_name(number) for number in range(len(paths))] or (known and set(known) != {*names}):
        raise DataError(f"{folder / split} lacks a token shard; {remedy}")
    shards = [Shard(path, n_vocab, known.get(path.name), remedy) for path in paths]
    remember(index, known, shards)
    return shards


def open_nanogpt(folder: Path, n_vocab: int, cache: Path) -> tuple[list[Shard], list[Shard]]:
    """nanoGPT's train.bin and val.bin, as they are. What is learnt by reading them once is kept in `cache`."""
    index = cache / f"nanogpt-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}.json"
    known, shards = read_json(index), []
    for path in (folder / "train.bin", folder / "val.bin"):
        facts = known.get(path.name)
        if facts and path.exists() and stamp(path.stat())[:2] != (facts["size"], facts["mtime_ns"]):
            facts = None  # the user's own file, which may become another
        shards.append(Shard(path, n_vocab, facts, "make it again with nanoGPT's prepare.py", header_bytes=0))
    remember(index, known, shards)
    return [shards[0]], [shards[1]]


def digest(shards: Iterable[Shard]) -> str:
    """SHA-256 over the shards' own: the same tokens, cut in the same way, wherever and whenever they were written."""
    return hashlib.sha256("".join(shard.facts["sha256"] for shard in shards).encode()).hexdigest()


def remember(index: Path, known: dict, shards: list[Shard]) -> None:
    """Keep what the shards' reading told, if any was read."""
    facts = {shard.path.name: shard.facts for shard in shards}
    if facts != known:
        with contextlib.suppress(OSError):  # a read-only or full disk costs one more reading, next time
            index.parent.mkdir(parents=True, exist_ok=True)
            write_json(index, facts)


def read_json(path: Path) -> dict:
    """{} where there is no such file, or it is not whole: what it said is then found again by reading the shards."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def write_json(path: Path, content: dict) -> None:
    """Whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def shard_name(number: int) -> str:
    return f"{number:06}.bin"


class Writer:
    """Appends tokens to the shards of a split's folder, where it goes on after `done`, what the last sync() returned.

    What was written after that sync is cut off, so that the files are the same bytes whether or not there was an
    interruption. A shard gets its header's count when it is full: before, it is none. DataError: less is there than
    `done` tells of.
    """

    def __init__(self, folder: Path, shard_tokens: int = SHARD_TOKENS, done: dict | None = None):
        self.folder, self.shard_tokens = folder, shard_tokens
        self.index = dict(done["index"]) if done else {}  # facts of the full shards
        self.tokens = sum(facts["tokens"] for facts in self.index.values())  # in all
        self.file, self.count, self.largest = None, 0, 0  # the open shard, its tokens, its largest id
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.bin"):
            if path.name not in self.index and not (done and done["open"] and path == self._path()):
                path.unlink()
        if done and done["open"]:
            self._reopen(done["open"])

    def append(self, tokens: np.ndarray) -> None:
        """uint16 (n,)."""
        while len(tokens):
            if self.file is None:
                self.file, self.hashed = self._path().open("w+b"), hashlib.sha256()
                self.file.write(bytes(HEADER_BYTES))
            part = np.ascontiguousarray(tokens[: self.shard_tokens - self.count], np.uint16)
            self.file.write(part)
            self._counted(part)
            if self.count == self.shard_tokens:
                self._full()
            tokens = tokens[len(part) :]

    def sync(self) -> dict:
        """All that was appended is on the disk: what a later Writer takes as `done`."""
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        return {"index": dict(self.index), "open": self.count}

    def finish(self) -> None:
        """The last shard gets its header, and the folder its index."""
        if self.file:
            self._full()
        write_json(self.folder / INDEX, self.index)

    def close(self) -> None:
        """Let go of the open shard, as it is."""
        if self.file:
            self.file.close()

    def _path(self) -> Path:
        return self.folder / shard_name(len(self.index))

    def _counted(self, part: np.ndarray) -> None:
        self.hashed.update(part)
        self.largest = max(self.largest, int(part.max()))
        self.count += len(part)
        self.tokens += len(part)

    def _full(self) -> None:
        header = np.zeros(HEADER_BYTES // 4, np.int32)
        header[:3] = MAGIC, VERSION, self.count
        self.file.seek(0)
        self.file.write(header)
        self.file.flush()
        os.fsync(self.file.fileno())
        size, mtime, _ = stamp(os.fstat(self.file.fileno()))
        self.file.close()
        facts = {"tokens": self.count, "sha256": self.hashed.hexdigest(), "largest": self.largest}
        self.index[self._path().name] = {**facts, "size": size, "mtime_ns": mtime}
        self.file, self.count, self.largest = None, 0, 0

    def _reopen(self, count: int) -> None:
        path, size = self._path(), HEADER_BYTES + 2 * count
        if not path.exists() or path.stat().st_size < size:
            raise DataError(f"{path} is shorter than the progress beside it tells; delete {self.folder.parent}")
        self.file, self.hashed = path.open("r+b"), hashlib.sha256()
        self.file.truncate(size)
        self._counted(np.memmap(path, np.uint16, "r", offset=HEADER_BYTES, shape=(count,)))
        self.file.seek(size)
