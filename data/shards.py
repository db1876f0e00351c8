"""Token shards in llm.c's format: 256 int32 (magic, version, number of tokens, zeros), then the tokens as uint16.

A split is a folder of them, written under a temporary name and renamed when whole: there is no half-written split.
Every document begins with the end-of-text id, as in llm.c.
"""

import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data.errors import DataError

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
SHARD_TOKENS = 100_000_000  # 200 MB a file


class Shard:
    """One verified file; `tokens` is a read-only uint16 memory map. DataError: damaged, or ids from n_vocab up."""

    def __init__(self, path: Path, n_vocab: int):
        self.path = path
        try:
            self.tokens = self._verified(n_vocab)
        except OSError as error:
            raise self._damaged(error.strerror) from None

    def __len__(self) -> int:
        return len(self.tokens)

    def _verified(self, n_vocab: int) -> np.ndarray:
        size = self.path.stat().st_size
        if size < HEADER_BYTES:
            raise self._damaged(f"{size} bytes, less than the header's {HEADER_BYTES}")
        magic, version, count = np.fromfile(self.path, np.int32, 3).tolist()
        if (magic, version) != (MAGIC, VERSION):
            raise self._damaged(f"magic {magic} and version {version}, not {MAGIC} and {VERSION}")
        if count < 1 or size != HEADER_BYTES + 2 * count:
            raise self._damaged(f"{size} bytes, but {count} tokens take {HEADER_BYTES + 2 * count}")
        tokens = np.memmap(self.path, np.uint16, "r", offset=HEADER_BYTES, shape=(count,))
        largest = int(tokens.max(initial=0))
        if largest >= n_vocab:
            raise self._damaged(f"it holds id {largest}, but the tokenizer has only {n_vocab} ids")
        return tokens

    def _damaged(self, why: str) -> DataError:
        return DataError(
            f"{self.path} is not a good token shard: {why}; delete {self.path.parent} to have it made again"
        )


def open_shards(folder: Path, split: str, n_vocab: int) -> list[Shard]:
    """The shards of `folder/split`, in order, each verified. DataError: there is none, or one is missing."""
    paths = sorted((folder / split).glob("*.bin"))
    if not paths or [path.name for path in paths] != [f"{number:06}.bin" for number in range(len(paths))]:
        raise DataError(f"{folder / split} lacks a token shard; delete {folder / split} to have it made again")
    return [Shard(path, n_vocab) for path in paths]


def write_split(folder: Path, split: str, documents: Iterable[np.ndarray], eot: int, shard_tokens=SHARD_TOKENS) -> None:
    """Write `documents` (uint16 arrays) as `folder/split/NNNNNN.bin`, unless that folder is there already."""
    final = folder / split
    if final.exists():
        return
    temporary = folder / f".{split}-{uuid.uuid4().hex}"
    try:
        temporary.mkdir(parents=True)
        for number, tokens in enumerate(chunks(documents, eot, shard_tokens)):
            write_shard(temporary / f"{number:06}.bin", tokens)
        temporary.rename(final)
    except OSError as error:
        if not final.exists():  # or another process wrote the same split first, which is as good
            raise DataError(f"token shards cannot be written to data.cache={folder.parent}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def chunks(documents: Iterable[np.ndarray], eot: int, size: int) -> Iterable[np.ndarray]:
    """The documents end to end, each behind an eot, cut into arrays of `size` tokens (the last one shorter)."""
    held, count = [], 0
    for document in documents:
        held += [np.array([eot], np.uint16), document]
        count += 1 + len(document)
        if count >= size:
            tokens = np.concatenate(held)
            for start in range(0, count - size + 1, size):
                yield tokens[start : start + size]
            held = [tokens[count - count % size :]]
            count %= size
    if count:
        yield np.concatenate(held)


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(HEADER_BYTES // 4, np.int32)
    header[:3] = MAGIC, VERSION, len(tokens)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(np.ascontiguousarray(tokens, np.uint16).tobytes())
        file.flush()
        os.fsync(file.fileno())
