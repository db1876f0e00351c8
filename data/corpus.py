"""Where text comes from, and which of it is for training and which for validation.

Documents are held out by a hash of their text, so that none is on both sides, not even as a copy, and adding some moves
no other. A document is a text file or a row of a .jsonl or .parquet file; with fewer than 20 text files, the last part
of each is held out instead.
"""

import glob
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from data.errors import DataError, line

PLAIN = (".txt", ".md", ".py")
ROWS = (".jsonl", ".jsonl.gz", ".parquet")
SPLIT_BY_FILE = 20  # text files
NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Source(ABC):
    """Documents in an order that stays. `identity` is JSON-able and changes with them, `files` are the local ones."""

    files: list[Path]
    identity: list
    val_fraction: float = 0.1  # 1: all of it, and there is no text for training

    @abstractmethod
    def documents(self, position: Any = None) -> Iterator[tuple[str, str]]:
        """(`train` or `val`, text), from the start or behind `position`. DataError: they cannot be read."""

    @abstractmethod
    def position(self) -> Any:
        """JSON-able: the place behind the document that documents() gave last."""


class Files(Source):
    """Local files, in the order of their names. DataError: one cannot be read."""

    def __init__(self, files: Iterable[Path], column: str, val_fraction: float):
        self.files, self.column, self.val_fraction = sorted(files), column, val_fraction
        self.by_hash = sum(kind(file) in PLAIN for file in self.files) >= SPLIT_BY_FILE
        self.identity = file_stamps(self.files)
        if any(kind(file) in ROWS for file in self.files):
            self.identity.append(column)

    def documents(self, position: list[int] | None = None) -> Iterator[tuple[str, str]]:
        first, skipped = position or (0, 0)
        for number, file in enumerate(self.files[first:], first):
            skip = skipped if number == first else 0
            for count, document in enumerate(islice(self.parts(file), skip, None), skip + 1):
                self.at = [number, count]
                yield document

    def position(self) -> list[int]:
        return self.at  # the file's number, and the documents read of it

    def parts(self, file: Path) -> Iterator[tuple[str, str]]:
        """The documents of one file."""
        if kind(file) in ROWS:
            texts = parquet(file, self.column) if kind(file) == ".parquet" else jsonl(file, self.column)
            yield from ((side(text, self.val_fraction), text) for text in texts)
            return
        text = read(file)
        if self.by_hash:
            yield side(text, self.val_fraction), text
        else:
            cut = int(len(text) * (1 - Fraction(str(self.val_fraction))))  # 0.1 is not quite a tenth as a float
            if self.val_fraction < 1:
                yield "train", text[:cut]
            yield "val", text[cut:]


def side(text: str, val_fraction: float) -> str:
    """`val` for this share of all texts, by SHA-256."""
    return "val" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < val_fraction * 2**64 else "train"


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # a byte order mark is not text
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it, or leave it out") from None
    except OSError as error:
        raise unreadable(path, error) from None


def jsonl(path: Path, column: str) -> Iterator[str]:
    """The texts in a column of a .jsonl or .jsonl.gz file: one JSON object a line."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for number, row in enumerate(file, 1):
                if row.isspace():
                    continue
                where = f"{path}, line {number}"
                try:
                    held = json.loads(row)
                except (ValueError, RecursionError) as error:  # also for what is not UTF-8, or too deep
                    raise DataError(f"{where}: not JSON ({error}); correct the line, or take it out") from None
                if (text := text_of(held, column, where)) is not None:
                    yield text
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def parquet(path: Path, column: str) -> Iterator[str]:
    """The texts in a column of a .parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{path} needs pyarrow: pip install pyarrow") from None
    try:
        with pq.ParquetFile(path) as file:
            text_of(dict.fromkeys(file.schema_arrow.names), column, str(path))
            batches = file.iter_batches(batch_size=256, columns=[column])
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
                if (text := text_of(row, column, f"{path}, row {number}")) is not None:
                    yield text
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None


def text_of(row: Any, column: str, where: str) -> str | None:
    """The row's text, None where it is null. DataError: there is no such column, or it holds no text."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object with a column {column}, and this is none")
    if column not in row:
        others = f"; pass data.column=..., one of: {', '.join(row)}" if row else ", nor any other"
        raise DataError(f"{where}: there is no column {column}{others}")
    text = row[column]
    if not isinstance(text, str | None):
        raise DataError(
            f"{where}: column {column} holds {type(text).__name__} and not text; choose another data.column"
        )
    if text and not text.isascii():  # half of a surrogate pair, "\ud83d" in JSON, has no UTF-8: as tiktoken does
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read: {line(error)}")


def kind(path: Path) -> str | None:
    """The suffix by which a file is read; None: not at all."""
    return next((suffix for suffix in PLAIN + ROWS if path.name.endswith(suffix)), None)


def file_stamps(files: list[Path]) -> list:
    """[name, bytes, time of change] of each."""
    try:
        stats = [(str(path), path.stat()) for path in files]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def stdlib(path: None = None, subset: None = None, column: str = "text", val_fraction: float = 0.1) -> Files:
    """The Python standard library's own source, about 11 MB on every machine, without its tests."""
    if path is not None:
        raise DataError(f"data.path={path} is for your own text: add data=text")
    root, files = Path(sysconfig.get_path("stdlib")), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_SOURCE]  # site-packages may hold 100,000 files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"data=stdlib: no .py files in {root}; choose data=text data.path=...")
    return Files(files, column, val_fraction)


def text(path: str | list[str] | None, subset: None = None, column: str = "text", val_fraction: float = 0.1) -> Files:
    """Files, folders (searched for the suffixes PLAIN and ROWS) and globs."""
    patterns = [path] if isinstance(path, str | int | float) else path  # 2024 is a name, too
    if not patterns or not isinstance(patterns, list) or any(each in (None, "") for each in patterns):
        raise DataError("data=text needs data.path=FILE, a folder, a glob, or a list '[a.txt,b/]'")
    files = sorted((file for pattern in patterns for file in matches(str(pattern))), reverse=True)
    return Files({file.resolve(): file for file in files}.values(), column, val_fraction)  # links may name one twice


def matches(pattern: str) -> list[Path]:
    """The text files that one entry of data.path means, a link under its own name: of Hugging Face's cache or git-annex
    the target's tells nothing."""
    path = local(pattern)
    found = [path] if path.exists() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    found = [path for path in found if path.exists()]  # a glob finds dangling links, too
    if not found:
        raise DataError(f"data.path={pattern}: no such file or folder, and nothing matches it as a glob")
    files = []
    for path in found:
        files += folder_files(path.resolve()) if path.is_dir() else [path.parent.resolve() / path.name]
    known = ", ".join(PLAIN + ROWS)
    if wrong := [file for file in files if not kind(file)]:
        raise DataError(f"data.path={pattern}: {wrong[0].name} is none of {known}")
    if not files:
        raise DataError(f"data.path={pattern}: holds no {known} file")
    return files


def local(name: str) -> Path:
    """A path, with the home folder for `~`. DataError: a name as no file can have: of nobody's home, or too long."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        raise DataError(f"data.path={name}: there can be no such file or folder: {line(error)}") from None
    return path


def folder_files(folder: Path) -> list[Path]:
    """The text files below a folder, but for those in hidden folders (.git, .venv)."""
    files = (file for file in folder.rglob("*") if kind(file) and file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
