"""Find the local files that data.path names: a file, a folder, a glob, or a list of them."""

import glob
import os
from pathlib import Path

from common.files import check_regular
from common.terminal import one_line
from data.errors import DataError, read_error

TEXT_SUFFIXES = (".txt", ".md", ".py")  # one file is one document
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")  # one row is one document
SUFFIXES = TEXT_SUFFIXES + ROW_SUFFIXES


def matching_files(pattern: str) -> list[Path]:
    """Return the text files that one entry of data.path names. Raises DataError if there is no text file."""
    path = local_path(pattern)
    paths = [path] if path.exists() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    paths = [path for path in paths if path.exists()]  # glob also returns dangling links
    if not paths:
        raise DataError(f"data.path={pattern}: no such file or folder, and nothing matches it as a glob")
    files = []
    for path in paths:
        if path.is_dir():
            files += filter(known_suffix, files_below(path.resolve()))
        else:
            files.append(path.parent.resolve() / path.name)  # a link's own name: its target may have no suffix
    suffixes = ", ".join(SUFFIXES)
    if unknown := [file for file in files if not known_suffix(file)]:
        raise DataError(f"data.path={pattern}: {unknown[0].name} does not end with one of {suffixes}")
    if not files:
        raise DataError(f"data.path={pattern}: no file in it ends with one of {suffixes}")
    return files


def local_path(name: str) -> Path:
    """Return the path. Raises DataError if no file can have this name."""
    path = Path(name)
    try:
        path.exists()
    except OSError as error:
        raise DataError(f"data.path={name} is not a valid path: {one_line(error)}") from None
    return path


def files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted, without hidden files and folders (.git, .venv).

    It follows links to folders, and reads each folder once. Raises DataError if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise read_error(Path(error.filename), error)

    files, visited = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in visited:  # a link leads to a folder above it, or two links lead here
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        visible = [Path(parent, name) for name in names if not name.startswith(".")]
        files += [file for file in visible if file.is_file()]
    return sorted(files)


def known_suffix(path: Path) -> str | None:
    """Return the suffix of `path` in lower case if it is one of SUFFIXES, else None."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def file_stamps(files: list[Path]) -> list:
    """Return [path, bytes, modification time in ns] of each file.

    Raises DataError if a file is missing, or if it is a FIFO, a device or the like.
    """
    try:
        statuses = [(str(path), check_regular(path)) for path in files]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    return [[name, status.st_size, status.st_mtime_ns] for name, status in statuses]
