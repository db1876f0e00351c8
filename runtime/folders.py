"""The folders that commands make, and what happens if they cannot be made.

At the end of a job, runtime/config.py removes the folders that stayed empty.
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
        where = f"{path.relative_to(folder)}: " if path.is_relative_to(folder) and path != folder else ""
        advice = "free some space, or choose another folder" if error.errno in FULL else "choose another folder"
        raise UserError(f"out_dir={folder} cannot be written: {where}{one_line(error)}; {advice}") from None


def file_name(text: object) -> str:
    """Return `text`, the name of a file. Raises UserError if it may lead out of its folder, be hidden or be a flag."""
    is_name = isinstance(text, str) and text[:1] not in ("", ".", "-") and "/" not in text and printable(text) == text
    is_name = is_name and not set("\t\n") & set(text) and len(text.encode(errors="replace")) <= 240
    check(is_name, f"{value_text(text)} cannot name a file: it must be short text without / and control characters")
    return text


def make_unique_folder(name: str) -> Path:
    """Make and return the folder out/<time>-<name>. If it exists, try <time>-<name>-2, -3 and so on."""
    first = Path("out", file_name(f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"))
    folder, number = first, 1
    with explain_unwritable(first.parent):
        while True:
            try:
                make_missing(folder)
                return folder
            except FileExistsError:
                check(os.path.lexists(folder), "out cannot be written: it is a broken link; choose an out_dir")
                number += 1
                folder = first.with_name(f"{first.name}-{number}")


def make_folder(out_dir: str | Path | None, name: str) -> Path:
    """Make and return `out_dir`, or out/<time>-<name>.

    From here on, output that cannot be written does not end the command. Raises UserError if the folder cannot be
    written, or if its name has control characters, because many lines print it.
    """
    outlive_output()
    if out_dir:
        check(printable(out_dir) == str(out_dir), f"out_dir={out_dir} has control characters; choose another folder")
    folder = Path(out_dir) if out_dir else make_unique_folder(name)
    with explain_unwritable(folder):
        if not folder.is_dir():
            make_missing(folder)
    return folder


def make_missing(folder: Path) -> None:
    """Make the folder and its missing parents, and list them in made_folders. Raises FileExistsError if it exists."""
    missing = [path for path in (*reversed(folder.parents), folder) if not path.exists()]
    folder.mkdir(parents=True)
    made_folders.extend(missing)


# NAME_CACHE_DIR is the variable for the folder of each compile cache
COMPILE_CACHES = "TORCHINDUCTOR", "TRITON", "FLASH_ATTENTION_CUTE_DSL", "CUTE_DSL", "QUACK", "TILELANG", "CUDA_TILE"


def cache_variables(folder: Path) -> dict[str, str]:
    """Return the environment variables that put all compile caches into `folder`."""
    return {f"{name}_CACHE_DIR": str(folder / name.lower()) for name in COMPILE_CACHES}
