"""Read documents from local files, and choose the split of each document: `train` or `val`.

A document is a text file, or a row of a .jsonl or .parquet file. A hash of its text decides its split, so all copies of
a text are in one split, and a new document does not change the split of another one.
"""

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from common.files import check_regular, open_regular
from common.terminal import warn
from data.errors import BadText, DataError, read_error
from data.paths import ROW_SUFFIXES, TEXT_SUFFIXES, file_stamps, known_suffix, matching_files

MOST_LINE_BYTES = 2**30  # of a .jsonl file. A .jsonl.gz of 10 MB may hold a line of 10 GB
FILES_TO_SPLIT_BY_HASH = 20  # with fewer text files, each file is cut: its last part is for validation
# folders of the standard library with tests or installed packages
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    """A document, or the part of it that is in one split."""

    split: str  # train | val
    text: str
    goes_on: bool = False  # the next text is the rest of this document, which is in the other split


class Source(ABC):
    """Documents in a fixed order."""

    files: list[Path]  # the local files that the text is read from
    identity: list  # for JSON; it changes if the documents change
    val_fraction: float = 0.1  # 1: all documents are for validation, none for training

    @abstractmethod
    def documents(self, position: Any = None) -> Iterator[Document]:
        """Yield each document, or those after `position`. Raises DataError if a document cannot be read."""

    @abstractmethod
    def position(self) -> Any:
        """Return the position after the last document that documents() yielded, in a form that JSON can hold."""


class Files(Source):
    """Local files, in the order of their names. Raises DataError if a file cannot be read."""

    def __init__(self, files: Iterable[Path], column: str, val_fraction: float, encoding_errors: str = "strict"):
        self.files, self.column, self.val_fraction = sorted(files), column, val_fraction
        self.encoding_errors = encoding_errors  # strict | replace | skip: what to do with a file that is not UTF-8
        suffixes = [known_suffix(file) for file in self.files]
        self.split_by_hash = sum(suffix in TEXT_SUFFIXES for suffix in suffixes) >= FILES_TO_SPLIT_BY_HASH
        self.identity = file_stamps(self.files)
        self.stamps = dict(zip(self.files, self.identity, strict=True))
        if any(suffix in ROW_SUFFIXES for suffix in suffixes):
            self.identity.append(column)
        if encoding_errors != "strict":
            self.identity.append(encoding_errors)

    def documents(self, position: list[int] | None = None) -> Iterator[Document]:
        first_file, texts_read = position or (0, 0)
        for file_number in range(first_file, len(self.files)):
            documents = islice(self.file_documents(self.files[file_number]), texts_read, None)
            for document in documents:
                texts_read += 1
                self.last_position = [file_number, texts_read]
                yield document
            texts_read = 0

    def position(self) -> list[int]:
        """Return [number of the file, number of texts that were read from it]."""
        return self.last_position

    def file_documents(self, file: Path) -> Iterator[Document]:
        suffix = known_suffix(file)
        if suffix in ROW_SUFFIXES:
            read_rows = parquet_texts if suffix == ".parquet" else jsonl_texts
            for text in read_rows(file, self.column):
                yield Document(split_of(text, self.val_fraction), text)
            self.check_unchanged(file)
            return
        text = read_text(file, self.encoding_errors)
        self.check_unchanged(file)
        if text is None:
            return
        if self.split_by_hash:
            yield Document(split_of(text, self.val_fraction), text)
            return
        cut = int(len(text) * (1 - Fraction(str(self.val_fraction))))  # the float 0.1 is not exactly a tenth
        if self.val_fraction < 1:
            yield Document("train", text[:cut], goes_on=True)
        yield Document("val", text[cut:])

    def check_unchanged(self, file: Path) -> None:
        """Raise DataError if the file's size or time changed: the shards of the changed file have another folder."""
        if file_stamps([file]) != [self.stamps[file]]:
            raise BadText(f"{file} changed while it was read: let nothing write to it, and run the same command again")


def split_of(text: str, val_fraction: float) -> str:
    """Return the split that the SHA-256 of a text decides. It is `val` for a share `val_fraction` of all texts."""
    first_64_bits = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    return "val" if first_64_bits < val_fraction * 2**64 else "train"


def read_text(path: Path, encoding_errors: str = "strict") -> str | None:
    """Return the text of a UTF-8 file. Raises DataError if it cannot be read, or if it is not UTF-8.

    With encoding_errors="replace", U+FFFD takes the place of what is not UTF-8. With "skip", such a file is None, with
    a warning.
    """
    try:
        with open_regular(path, "r", errors="replace" if encoding_errors == "replace" else "strict") as file:
            return file.read().removeprefix("\ufeff")  # a byte order mark, which is not text
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8 text (byte {error.start})"
        if encoding_errors == "strict":
            remedy = "convert the file, leave it out, or pass data.encoding_errors=replace or skip"
            raise BadText(f"{what}: {remedy}") from None
        warn(f"{what}, and is skipped")
        return None
    except (OSError, MemoryError) as error:
        raise read_error(path, error) from None


def jsonl_texts(path: Path, column: str) -> Iterator[str]:
    """Yield the texts in a column of a .jsonl or .jsonl.gz file, which has one JSON object on each line.

    Raises DataError if the file cannot be read, or if a line is not JSON or has no text in the column.
    """
    try:
        is_gzip = known_suffix(path) == ".jsonl.gz"
        with open_regular(path) as raw, gzip.GzipFile(fileobj=raw) if is_gzip else raw as file:
            for number in count(1):
                json_line = file.readline(MOST_LINE_BYTES + 1)
                if not json_line:
                    return
                where = f"{path}, line {number}"
                if len(json_line) > MOST_LINE_BYTES:
                    raise BadText(f"{where}: it has more than {MOST_LINE_BYTES:,} bytes; cut the document")
                if json_line.isspace():
                    continue
                try:
                    row = json.loads(json_line)
                except (ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
                    raise BadText(f"{where}: not JSON ({error}); correct or delete the line") from None
                if (text := text_of(row, column, where)) is not None:
                    yield text
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise read_error(path, error) from None


def parquet_texts(path: Path, column: str) -> Iterator[str]:
    """Yield the texts in a column of a .parquet file.

    Raises DataError if the file cannot be read, if it has no such column, or if the column holds no text.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(path)
        with pq.ParquetFile(path) as file:
            text_of(dict.fromkeys(file.schema_arrow.names), column, str(path))  # raises if there is no such column
            batches = file.iter_batches(batch_size=256, columns=[column])
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                if (text := text_of(row, column, f"{path}, row {number}")) is not None:
                    yield text
    except (OSError, pa.ArrowException, UnicodeDecodeError, MemoryError) as error:
        raise read_error(path, error) from None


def text_of(row: Any, column: str, where: str) -> str | None:
    """Return the text in a column of a row, or None if the column holds null.

    Raises DataError if the column is missing or holds something other than text. The message starts with `where`.
    """
    if not isinstance(row, dict):
        raise BadText(f"{where}: a row must be a JSON object with a column {column}, and this row is not an object")
    if column not in row:
        hint = f"; pass data.column=..., one of: {', '.join(row):.300}" if row else " and no other column"
        raise BadText(f"{where}: there is no column {column}{hint}")
    text = row[column]
    if not isinstance(text, str | None):
        raise BadText(f"{where}: column {column} holds {type(text).__name__}, not text; choose another data.column")
    if text and not text.isascii():
        # JSON may hold half of a surrogate pair ("\ud83d"), which UTF-8 cannot encode. Replace it as tiktoken does.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def stdlib_source(val_fraction: float = 0.1, encoding_errors: str = "strict") -> Files:
    """Return the source code of Python's standard library without its tests: about 12 MB on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        # os.walk does not enter the folders that are removed here; site-packages may hold 100,000 files
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return Files(files, "text", val_fraction, encoding_errors)


def text_source(
    path: str | list[str] | None, column: str = "text", val_fraction: float = 0.1, encoding_errors: str = "strict"
) -> Files:
    """Return the text files that data.path names: a file, a folder, a glob, or a list of them.

    Raises DataError if data.path is empty, or if one entry of it matches no text file.
    """
    patterns = [path] if isinstance(path, str | int | float) else path  # Hydra reads data.path=2024 as a number
    if not patterns or not isinstance(patterns, list) or any(pattern in (None, "") for pattern in patterns):
        raise DataError("data=text needs data.path: a file, a folder, a glob, or a list '[a.txt,b/]'")
    files = [file for pattern in patterns for file in matching_files(str(pattern))]
    unique_files = {}  # target -> first name: if two links lead to one file, the file counts once
    for file in sorted(files):
        unique_files.setdefault(file.resolve(), file)
    return Files(unique_files.values(), column, val_fraction, encoding_errors)
