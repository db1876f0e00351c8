"""JSON files that begin with the SHA-256 of the rest of the file, so that no change of the file goes unnoticed.

    {"sha256": "5f2d...","step": 26, ...}

All rooms may import this file, and it imports none of them.
"""

import hashlib
import json
import os
from pathlib import Path

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
    """Write a file. A kill leaves the old content or the new one. On return, the new content is on the disk."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # the disk is full
        temporary.unlink(missing_ok=True)
        raise


def add_sha256(text: str) -> bytes:
    """Return the text of a JSON object with its SHA-256 as the first key."""
    comma = "" if text[1:].strip() == "}" else ","
    rest = f"{comma}{text[1:]}\n".encode()
    return prefix(rest) + rest


def prefix(rest: bytes) -> bytes:
    """Return the beginning of the file: the SHA-256 of `rest`."""
    return b'{"sha256": "%s"' % hashlib.sha256(rest).hexdigest().encode()
