"""JSON files that begin with the SHA-256 of the rest of the file, so that no change of the file goes unnoticed.

    {"sha256": "5f2d...","step": 26, ...}

A row in result.json and a line of metrics.jsonl have a checksum, too. It is the last key, so that other tools read them
as before.

    {"step": 26, "train/loss": 5.25, "crc32": "91c35b02"}

All rooms may import this file, and it imports none of them.
"""

import hashlib
import json
import os
import re
import zlib
from pathlib import Path

# A line of figures has a step and ends like this, also if the name of the last key was damaged
ENDS_WITH_CRC32 = re.compile(rb'": "[0-9a-f]{8}"\}$')
PREFIX_BYTES = len('{"sha256": ""') + 64


def read_json(path: Path) -> dict:
    """Return the JSON object in a file, without its SHA-256.

    Raises OSError, or ValueError if the SHA-256 is missing or is not of the rest of the file.
    """
    content = path.read_bytes()
    if content[:PREFIX_BYTES] != prefix(content[PREFIX_BYTES:]):
        raise ValueError("its SHA-256 is wrong, or missing (older versions wrote none)")
    facts = json.loads(content)
    del facts["sha256"]
    return facts


def write_json(path: Path, facts: dict, indent: int | None = None) -> None:
    """Write a JSON file with its SHA-256, as write_atomically() does."""
    write_atomically(path, add_sha256(json.dumps(facts, indent=indent)))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file. A kill leaves the old content or the new one. On return, the new content is on the disk.

    An OSError names the file, also if the disk is full.
    """
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)
        raise


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
    """Return the JSON object in a line of a .jsonl file or in result.json, without its CRC-32.

    NaN and infinity become None. Raises ValueError or RecursionError if it is no JSON object, or if the CRC-32 is
    wrong. A line without a CRC-32 is not checked, because older versions wrote none.
    """
    row = json.loads(line, parse_constant=lambda name: None)
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    if "crc32" in row or ("step" in row and ENDS_WITH_CRC32.search(line)):
        text = line.decode()
        if text != add_crc32(text[: text.rindex(", ")] + "}"):
            raise ValueError("its CRC-32 is wrong")
        del row["crc32"]
    return row
