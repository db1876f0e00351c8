"""Write token shards, or resume them. The format is in shards.py.

The SHA-256 is of the tokens in memory. Before the writing resumes, it is compared with the files on the disk.
"""

import os
from hashlib import sha256
from pathlib import Path

import numpy as np

from common.files import open_regular, write_json
from data.errors import DataError, read_error
from data.shards import HEADER_BYTES, INDEX, SHARD_TOKENS, hash_tokens, header, shard_name, shard_names, stamp


class ChangedShard(DataError):
    """The open shard on the disk does not begin with the tokens that were written."""


class Writer:
    """Appends tokens to the shards in the folder of a split. Resumes from `state`, which an earlier sync() returned.

    The constructor deletes the tokens that were written after that sync(). The header of a shard is written last, so an
    incomplete shard is not valid. Raises ChangedShard if the tokens of the open shard differ from `state`, and
    DataError if it cannot be read. count_unchanged() reads the complete shards.
    """

    def __init__(
        self, folder: Path, shard_tokens: int = SHARD_TOKENS, state: dict | None = None, dtype: type = np.uint16
    ):
        self.folder, self.shard_tokens, self.dtype = folder, shard_tokens, dtype
        self.token_bytes = np.dtype(dtype).itemsize
        self.index = dict(state["index"]) if state else {}  # facts of the complete shards
        self.tokens = sum(facts["tokens"] for facts in self.index.values())  # in all shards
        self.file, self.open_tokens, self.open_largest = None, 0, 0  # the open shard, its tokens and its largest id
        facts = state["open"] if state else None
        folder.mkdir(parents=True, exist_ok=True)
        for name in set(shard_names(folder)) - {*self.index, facts and self._path().name}:
            (folder / name).unlink()
        if facts:
            try:
                self._reopen(facts)
            except BaseException:
                self.close()
                raise

    def append(self, tokens: np.ndarray) -> None:
        """Append tokens, (n,) of `dtype`."""
        while len(tokens):
            if self.file is None:
                self.file, self.open_sha256 = open_regular(self._path(), "w+b"), sha256()
                self.file.write(bytes(HEADER_BYTES))
            part = np.ascontiguousarray(tokens[: self.shard_tokens - self.open_tokens], self.dtype)
            self.file.write(part)
            self.open_sha256.update(part)
            self.open_largest = max(self.open_largest, int(part.max()))
            self.open_tokens += len(part)
            self.tokens += len(part)
            if self.open_tokens == self.shard_tokens:
                self._complete_shard()
            tokens = tokens[len(part) :]

    def sync(self) -> dict:
        """Flush all appended tokens to the disk. Return the state (for JSON) from which another Writer can resume."""
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        return {"index": dict(self.index), "open": self._facts() if self.file else None}

    def finish(self) -> None:
        """Complete the last shard and write index.json."""
        if self.file:
            self._complete_shard()
        write_json(self.folder / INDEX, self.index)

    def close(self) -> None:
        if self.file:
            self.file.close()

    def _path(self) -> Path:
        """Return the path of the open shard, or of the next one if none is open."""
        return self.folder / shard_name(len(self.index))

    def _facts(self) -> dict:
        return {"tokens": self.open_tokens, "sha256": self.open_sha256.hexdigest(), "largest": self.open_largest}

    def _complete_shard(self) -> None:
        """Write the header of the open shard, close the file, and add its facts to the index."""
        self.file.seek(0)
        self.file.write(header(self.open_tokens, self.dtype))
        self.file.flush()
        os.fsync(self.file.fileno())
        size, mtime, _ = stamp(os.fstat(self.file.fileno()))
        self.file.close()
        self.index[self._path().name] = {**self._facts(), "size": size, "mtime_ns": mtime}
        self.file, self.open_tokens, self.open_largest = None, 0, 0

    def _reopen(self, facts: dict) -> None:
        """Open the incomplete shard, and truncate it after its tokens whose `facts` are given."""
        path, count = self._path(), facts["tokens"]
        try:
            self.file = open_regular(path, "r+b")
            if os.fstat(self.file.fileno()).st_size < HEADER_BYTES + self.token_bytes * count:
                raise ChangedShard(f"{path} became shorter after it was written")
            self.file.seek(HEADER_BYTES)
            self.open_sha256, self.open_largest = hash_tokens(self.file, count, self.dtype)
        except FileNotFoundError:
            raise ChangedShard(f"{path} is gone") from None
        except OSError as error:
            raise read_error(path, error) from None
        self.open_tokens, self.tokens = count, self.tokens + count
        if self._facts() != facts:
            raise ChangedShard(f"{path} changed after it was written (its SHA-256 is different)")
        self.file.truncate(HEADER_BYTES + self.token_bytes * count)
        self.file.seek(0, os.SEEK_END)


def count_unchanged(folder: Path, index: dict, dtype: type) -> int:
    """Return how many shards in `folder`, from the first on, are as they were written. `index` has their facts.

    Reads them, which takes 1 s for each GB. Raises DataError if one cannot be read.
    """
    for number, (name, facts) in enumerate(index.items()):
        try:
            with open_regular(folder / name) as file:
                size, count = os.fstat(file.fileno()).st_size, facts["tokens"]
                whole_size = HEADER_BYTES + np.dtype(dtype).itemsize * count
                if size != whole_size or file.read(HEADER_BYTES) != header(count, dtype):
                    return number
                if hash_tokens(file, count, dtype)[0].hexdigest() != facts["sha256"]:
                    return number
        except FileNotFoundError:
            return number
        except OSError as error:
            raise read_error(folder / name, error) from None
    return len(index)
