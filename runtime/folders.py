"""The folders that commands make, and what happens if they cannot be made.

At the end of a job, runtime/config.py removes the ones that stayed empty.
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from common.terminal import one_line, outlive_output, printable
from runtime.config import UserError, check, made_folders, value_text

FULL = errno.ENOSPC, errno.EDQUOT


@contextlib.contextmanager
def explain_unwritable(folder: Path) -> Iterator[None]:
    """Turn an OSError within this context into a UserError that names out_dir, and the file in it."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or folder)
        where = f"{path.name}: " if path.parent == folder else ""
        advice = "free some space, or choose another folder" if error.errno in FULL else "choose another folder"
        raise UserError(f"out_dir={folder} cannot be written: {where}{one_line(error)}; {advice}") from None


def file_name(text: object) -> str:
    """Return the name for a file or folder. Raises UserError if it may be outside of its folder, hidden or a flag.

    A name from a row or a config must pass here before it becomes a part of a path.
    """
    is_name = isinstance(text, str) and text[:1] not in ("", ".", "-") and "/" not in text and printable(text) == text
    is_name = is_name and not set("\t\n") & set(text) and len(text.encode(errors="replace")) <= 240
    check(is_name, f"{value_text(text)} cannot name a file: it must be short text without / and control characters")
    return text


def make_unique_folder(parent: Path, name: str) -> Path:
    """Make and return the folder `parent/name`. If it exists, try `name-2`, `name-3` and so on."""
    folder, number = parent / file_name(name), 1
    while True:
        try:
            make_missing(folder)
            return folder
        except FileExistsError:
            if not os.path.lexists(folder):
                raise UserError(f"{parent} cannot be written: it is a broken link; choose an out_dir") from None
            number += 1
            folder = parent / f"{name}-{number}"
        except OSError as error:
            raise UserError(f"{parent} cannot be written: {error.strerror}; choose an out_dir") from None


def make_folder(out_dir: str | Path | None, name: str) -> Path:
    """Make and return `out_dir`, or out/<time>-<name>.

    From here on, output that cannot be written does not end the command. Raises UserError if the folder cannot be
    written, or if its name has control characters, because many lines print it.
    """
    outlive_output()
    if out_dir:
        check(printable(out_dir) == str(out_dir), f"out_dir={out_dir} has control characters; choose another folder")
    folder = Path(out_dir) if out_dir else make_unique_folder(Path("out"), f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    with explain_unwritable(folder):
        if not folder.is_dir():
            make_missing(folder)
    return folder


def make_missing(folder: Path) -> None:
    """Make the folder and its missing parents, and list them in made_folders. Raises FileExistsError if it exists."""
    missing = [path for path in (*reversed(folder.parents), folder) if not path.exists()]
    folder.mkdir(parents=True)
    made_folders.extend(missing)
