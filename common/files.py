"""Read and write files. It imports no other room.

A file is opened by open_regular(), so that a FIFO or a device in its place is an error and not a hang. A file that is
written by write_atomically() has its old content or the new one, whenever the process is killed.

A JSON file begins with the SHA-256 of the rest of the file, so that no change of the file goes unnoticed.

    {"sha256": "5f2d...","step": 26, ...}

A row in result.json and a line of a .jsonl file have a checksum, too. It is the last key, so that other tools read
them as before.

    {"step": 26, "train/loss": 5.25, "crc32": "91c35b02"}
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

# A line with a CRC-32 ends like this, also if the name of the last key was damaged
ENDS_WITH_CRC32 = re.compile(rb'": "[0-9a-f]{8}"\}$')
PREFIX_BYTES = len('{"sha256": ""') + 64
MOST_BYTES = 2**30  # of a file that is read as a whole. A manifest has 20 KB, and the metrics of a million steps 500 MB
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}  # the others are devices
temporary_numbers = itertools.count()  # of this process


class NotRegularFile(OSError):
    """A folder, a FIFO, a socket or a device is in the place of a file."""


def open_regular(path: str | os.PathLike, mode: str = "rb", buffering: int = -1, errors: str | None = None) -> IO:
    """Open a regular file as open() does, a text as UTF-8; never wait for a FIFO. Raises OSError that names it."""

    def opener(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket, or a FIFO that nobody reads
                check_regular(name)
            raise
        try:
            require_regular(name, os.fstat(descriptor))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, buffering, None if "b" in mode else "utf-8", errors, opener=opener)


def check_regular(path: str | os.PathLike) -> os.stat_result:
    """Return the status of a file that a library opens by its path. Raises OSError as open_regular() does."""
    status = os.stat(path)
    require_regular(path, status)
    return status


def require_regular(path: str | os.PathLike, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise NotRegularFile(errno.EINVAL, f"it is {kind}, and must be a regular file", str(path))


def read_bytes(path: str | os.PathLike, at_most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError as open_regular() does, or if it has more bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = read_up_to(file, at_most) if size <= at_most else None
    if content is None:
        raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes", str(path))
    return content


def read_up_to(file: IO, at_most: int) -> bytes | None:
    """Return the rest of a binary file; None if it has more bytes. A file in /proc has the size 0 and any content."""
    parts, size = [], 0
    while part := file.read(2**20):  # read(n) allocates n bytes, also for a small file
        parts.append(part)
        size += len(part)
        if size > at_most:
            return None
    return b"".join(parts)


def read_text(path: str | os.PathLike, at_most: int = MOST_BYTES) -> str:
    """Return the text of a regular file, UTF-8. Raises OSError as read_bytes() does, or UnicodeDecodeError."""
    return read_bytes(path, at_most).decode()


def read_json(path: Path) -> dict:
    """Return the JSON object in a file, without its SHA-256. Raises OSError, or ValueError if the SHA-256 is wrong."""
    content = read_bytes(path)
    if content[:PREFIX_BYTES] != prefix(content[PREFIX_BYTES:]):
        raise ValueError("its SHA-256 is wrong, or missing (older versions wrote none)")
    facts = json.loads(content)
    del facts["sha256"]
    return facts


def write_json(path: Path, facts: dict, indent: int | None = None) -> None:
    """Write a JSON file with its SHA-256, as write_atomically() does."""
    write_atomically(path, add_sha256(json.dumps(facts, indent=indent)))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file as replace_file() does."""
    with replace_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[IO]:
    """A context with a file to write, which takes the place of `path` at its end, unless an exception ends it.

    A kill leaves the old content or the new one. After the context, the new content is on the disk; a power cut may
    still bring the old file back, because the folder is not synced. An OSError names `path`, also if the disk is full.
    """
    temporary = None
    try:
        remove_temporaries(path)
        with create_temporary(path) as file:
            temporary = Path(file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)  # before the lock is released
    except BaseException as error:
        if temporary:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def create_temporary(path: Path) -> IO:
    """Create a temporary file for a new content of `path`. While it is open, its lock says that its writer lives."""
    while True:
        try:
            file = path.with_name(f".{path.name}-{os.getpid()}-{next(temporary_numbers)}").open("xb")
        except FileExistsError:  # of a killed process with the same number, on a disk without locks
            continue
        with contextlib.suppress(OSError):  # this disk has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # remove_temporaries() of another process was faster than the lock


def remove_temporaries(path: Path) -> None:
    """Remove the temporary files of write_atomically() for this path whose writers were killed."""
    for name in glob.glob(f"{glob.escape(str(path.parent / f'.{path.name}'))}-[0-9]*"):
        with contextlib.suppress(OSError), open_regular(name, "r+b") as file:  # NFS locks no file that is only read
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if its writer lives
            os.unlink(name)


def add_sha256(text: str) -> bytes:
    """Return the text of a JSON object with its SHA-256 as the first key."""
    comma = "" if text[1:].strip() == "}" else ","
    rest = f"{comma}{text[1:]}\n".encode()
    return prefix(rest) + rest


def prefix(rest: bytes) -> bytes:
    """Return the beginning of the file: the SHA-256 of `rest`."""
    return b'{"sha256": "%s"' % hashlib.sha256(rest).hexdigest().encode()


def add_crc32(text: str) -> str:
    """Return the text of a JSON object, which may be indented, with its CRC-32 as the last key."""
    start = text[:-1].rstrip()
    crc32 = zlib.crc32(f"{start}}}".encode())
    return f'{start}, "crc32": "{crc32:08x}"}}'


def read_line(line: bytes) -> dict:
    """Return the JSON object in a line of a .jsonl file or in result.json, without its CRC-32. NaN becomes None.

    Raises ValueError or RecursionError if it is no JSON object, or if the CRC-32 is wrong. A line without one is valid.
    """
    row = json.loads(line, parse_constant=lambda name: None)
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    if "crc32" in row or ENDS_WITH_CRC32.search(line):
        text = line.decode()
        if text != add_crc32(text[: text.rindex(", ")] + "}"):
            raise ValueError("its CRC-32 is wrong")
        del row["crc32"]
    return row


def last_line(path: Path) -> dict:
    """Return read_line() of the last line of a .jsonl file that is not damaged; {} if there is none."""
    with contextlib.suppress(OSError):
        for line in reversed(read_bytes(path).splitlines()):
            with contextlib.suppress(ValueError, RecursionError):  # damaged, or incomplete after a kill
                return read_line(line)
    return {}
