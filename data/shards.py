"""Token shards in llm.c's format: 256 int32 (magic, version, number of tokens, zeros), then the tokens.

The tokens are uint16; those of a tokenizer with more than 65,536 ids are uint32, with llm.c's header for Llama 3.

A split is a folder of shards: `000000.bin`, `000001.bin` and so on. Each has SHARD_TOKENS tokens; the last one may have
fewer. `index.json` holds facts about each shard: number of tokens, SHA-256 of the tokens, largest id, and the size and
modification time of the file. A shard of at most READ_TOKENS is always read, and its hash is compared. A larger shard
is read only if its size or time differs from the index, so 20 GB open in milliseconds.
nanoGPT's .bin files have the same format, mostly without a header; the index of their facts is in data.cache.
"""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from common.files import open_regular, read_json, write_json
from common.terminal import warn
from data.errors import DataError, read_error

HEADER_BYTES = 1024
FORMATS = {np.uint16: (20240520, 1), np.uint32: (20240801, 7)}  # dtype of the tokens -> magic, version
SHARD_TOKENS = 100_000_000  # 200 or 400 MB a file
INDEX = "index.json"
READ_TOKENS = 1 << 24  # tokens that are hashed at a time: 32 or 64 MiB
GUESS_TOKENS = 1 << 16  # enough to guess the dtype of a file


class Shard:
    """One verified file. `tokens` is a read-only memory map, (n,). `facts` is the shard's entry for the index.

    Its dtype is uint16, or uint32 if n_vocab is more than 65,536. The header of a file of nanoGPT decides its dtype;
    without a header it is uint16. `known` is the shard's entry in the index on the disk, or None. Error messages end
    with `remedy`. With `verify`, the tokens are read even if the file's size and time are unchanged. With `is_nanogpt`,
    the file may lack the header, and the user may replace it. Raises DataError if the file cannot be read, if it is not
    a shard, if the SHA-256 of its tokens is not the known one, or if it holds an id of n_vocab or more.
    """

    def __init__(
        self,
        path: Path,
        n_vocab: int,
        known: dict | None,
        remedy: str,
        verify: bool = False,
        is_nanogpt: bool = False,
    ):
        self.path, self.n_vocab, self.remedy = path, n_vocab, remedy
        self.dtype, header_bytes = id_dtype(n_vocab), HEADER_BYTES
        try:
            with open_regular(path) as file:
                size, mtime, _ = self.opened_stamp = stamp(os.fstat(file.fileno()))
                header = file.read(HEADER_BYTES)
                if is_nanogpt:
                    self.dtype, header_bytes = self._nanogpt_format(header)
                count = self._token_count(header, header_bytes)
                self.tokens = np.memmap(file, self.dtype, "r", offset=header_bytes, shape=(count,))
                if not header_bytes and has_wider_ids(self.tokens):
                    raise self._damage_error("every second uint16 in it is 0, so its ids have 4 or 8 bytes")
                unchanged = known is not None and (known["size"], known["mtime_ns"]) == (size, mtime)
                if is_nanogpt and not unchanged:
                    known = None
                if unchanged and not verify and count > READ_TOKENS:
                    self.facts = known
                else:
                    file.seek(header_bytes)
                    self.facts = {**read_facts(file, count, self.dtype), "size": size, "mtime_ns": mtime}
        except OSError as error:  # an unreadable file may be intact, so the message does not say to delete it
            raise read_error(path, error) from None
        self._check_ids(self.facts["largest"])
        if known is not None and known["sha256"] != self.facts["sha256"]:
            raise self._damage_error("its tokens changed after they were written (their SHA-256 is different)")

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens from `start` to `stop`, (n,). Raises DataError if an id is not in the vocabulary."""
        tokens = self.tokens[start:stop]
        self._check_ids(int(tokens.max()))  # takes 3 us; on a GPU, a wrong id ends the process without a reason
        return tokens

    def check_unchanged(self) -> None:
        """Raise DataError if the file changed since it was opened. It takes 1 us.

        Call it before a read: if the file was cut short, a read beyond its end kills the process (SIGBUS).
        """
        try:
            current_stamp = stamp(self.path.stat())
        except OSError as error:
            raise self._change_error(error.strerror) from None
        if current_stamp != self.opened_stamp:
            raise self._change_error("rewritten")

    def _nanogpt_format(self, header: bytes) -> tuple[type, int]:
        """Return the dtype of a file of nanoGPT and the size of its header: llm.c's, or 0. Raises DataError."""
        for dtype, (magic, _) in FORMATS.items():
            if header[:4] == magic.to_bytes(4, "little"):
                return dtype, HEADER_BYTES
        if self.n_vocab > 2**16:
            raise self._damage_error(f"without a header its ids are uint16, but the tokenizer has {self.n_vocab} ids")
        return np.uint16, 0

    def _token_count(self, header: bytes, header_bytes: int) -> int:
        """Return the number of tokens by the header, or by the size. Raises DataError if the header is wrong."""
        size = self.opened_stamp[0]
        if not header_bytes:
            if size < 2 or size % 2:
                raise self._damage_error(f"{size} bytes are not a whole number of uint16 tokens")
            return size // 2
        if size < header_bytes:
            raise self._damage_error(f"{size} bytes, less than the header's {header_bytes}")
        magic, version, count = np.frombuffer(header, np.int32, 3).tolist()
        expected = FORMATS[self.dtype]
        if (magic, version) != expected:
            raise self._damage_error(f"magic {magic} and version {version}, not {expected[0]} and {expected[1]}")
        whole_size = header_bytes + np.dtype(self.dtype).itemsize * count
        if count < 1 or size != whole_size:
            raise self._damage_error(f"{size} bytes, but {count} tokens take {whole_size}")
        return count

    def _check_ids(self, largest: int) -> None:
        if largest >= self.n_vocab:
            raise self._damage_error(f"it holds id {largest}, but the tokenizer has only {self.n_vocab} ids")

    def _damage_error(self, reason: str) -> DataError:
        return DataError(f"{self.path} is not a good token shard: {reason}; {self.remedy}")

    def _change_error(self, change: str) -> DataError:
        return DataError(
            f"{self.path} changed while it was being read ({change}), so the next batches would be different ones: "
            "restore the file and resume, and let nothing write to it during a run"
        )


def stamp(stat: os.stat_result) -> tuple[int, int, int]:
    """Return (bytes, modification time in ns, inode) of a file. It changes if the file is written to or replaced."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def has_wider_ids(tokens: np.ndarray) -> bool:
    """Return whether every second number of `tokens`, (n,) uint16, is 0: they are ids of 4 or 8 bytes."""
    part = tokens[len(tokens) // 4 * 2 :][:GUESS_TOKENS]  # not at the start, where another program's header may be
    return len(part) >= 8 and bool(part.any()) and not part[1::2].any()


def id_dtype(n_vocab: int) -> type:
    """Return the dtype of ids in arrays and in token shards: uint16, or uint32 for more than 65,536 ids."""
    return np.uint16 if n_vocab <= 2**16 else np.uint32


def read_facts(file: IO[bytes], count: int, dtype: type = np.uint16) -> dict:
    """Read the next `count` tokens. Return `tokens` (count), `sha256` (of their bytes) and `largest` (the largest id).

    It reads the file and not a memory map: an error of the disk is then an OSError, and does not kill the process.
    """
    sha256, largest = hash_tokens(file, count, dtype)
    return {"tokens": count, "sha256": sha256.hexdigest(), "largest": largest}


def hash_tokens(file: IO[bytes], count: int, dtype: type) -> tuple["hashlib._Hash", int]:
    """Read the next `count` tokens. Return the SHA-256 of their bytes, to which more can be added, and the largest id.

    Raises OSError if there are fewer tokens.
    """
    sha256, largest = hashlib.sha256(), 0
    for start in range(0, count, READ_TOKENS):
        size = np.dtype(dtype).itemsize * min(READ_TOKENS, count - start)
        part = file.read(size)
        if len(part) < size:
            raise OSError(errno.EIO, "it became shorter while it was read", file.name)
        sha256.update(part)
        largest = max(largest, int(np.frombuffer(part, dtype).max()))
    return sha256, largest


def header(count: int, dtype: type) -> bytes:
    """Return the header of a shard with `count` tokens."""
    numbers = np.zeros(HEADER_BYTES // 4, np.int32)
    numbers[:3] = *FORMATS[dtype], count
    return numbers.tobytes()


def open_shards(folder: Path, split: str, n_vocab: int, verify: bool = False) -> list[Shard]:
    """Return the verified shards of `folder/split`, in order. Raises DataError if one is missing or damaged."""
    names = shard_names(folder / split)
    remedy = f"delete {folder} and prepare the data again"
    index = folder / split / INDEX
    known = read_if_valid(index)
    expected_names = [shard_name(number) for number in range(len(names))]
    if not names or names != expected_names or (known and set(known) != set(names)):
        raise DataError(f"{folder / split} lacks a token shard; {remedy}")
    shards = [Shard(folder / split / name, n_vocab, known.get(name), remedy, verify) for name in names]
    update_index(index, known, shards)
    return shards


def open_nanogpt_shards(
    folder: Path, n_vocab: int, cache: Path, verify: bool = False
) -> tuple[list[Shard], list[Shard]]:
    """Return the shards of nanoGPT's train.bin and val.bin. Their facts are in an index in `cache`."""
    index = cache / f"nanogpt-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}.json"
    known, shards = read_if_valid(index), []
    for path in (folder / "train.bin", folder / "val.bin"):
        remedy = "write it again, as uint16, as nanoGPT's prepare.py does"
        if n_vocab > 2**16:
            remedy = "write it again, as uint32 after llm.c's header for Llama 3 (magic 20240801, version 7)"
        shards.append(Shard(path, n_vocab, known.get(path.name), remedy, verify, is_nanogpt=True))
    update_index(index, known, shards)
    return [shards[0]], [shards[1]]


def digest(shards: Iterable[Shard]) -> str:
    """Return one SHA-256 over the SHA-256s of all shards, as hex digits."""
    return hashlib.sha256("".join(shard.facts["sha256"] for shard in shards).encode()).hexdigest()


def update_index(index: Path, known: dict, shards: list[Shard]) -> None:
    """Write the facts of `shards` to the file `index` if they differ from `known`, the current content of the file."""
    facts = {shard.path.name: shard.facts for shard in shards}
    if facts != known:
        with contextlib.suppress(OSError):  # on a read-only or full disk, the next run reads the shards once more
            index.parent.mkdir(parents=True, exist_ok=True)
            write_json(index, facts)


def read_if_valid(path: Path, then: str = "is written again") -> dict:
    """Return the content of a JSON file; {} if it is missing or damaged. If it is damaged, a warning says what `then`.

    Raises DataError if it cannot be read, because it may be good.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise read_error(path, error) from None
    except ValueError as error:
        warn(f"{path} is damaged and {then}: {error}")
        return {}


def shard_names(folder: Path) -> list[str]:
    """Return the sorted names of the shards in a folder. Raises DataError if the folder cannot be read."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(".bin"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_error(folder, error) from None


def shard_name(number: int) -> str:
    return f"{number:06}.bin"
