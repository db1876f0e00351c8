"""Where text comes from, and which of it is for training and which for validation.

With at least 20 files the split is by file, one in ten by a hash of its text, so that no document is on both sides,
not even as a copy, and adding files moves none. With fewer, the last tenth of every file is for validation.
"""

import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.errors import DataError

SUFFIXES = (".txt", ".md", ".py")
SPLIT_BY_FILE = 20  # files
NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Source:
    """Some text files, in the order of their names."""

    def __init__(self, name: str, files: Iterable[Path]):
        self.name, self.files = name, sorted(files)

    def documents(self, split: str) -> Iterator[str]:
        """The texts of `train` or `val`."""
        for text in map(read, self.files):
            if len(self.files) < SPLIT_BY_FILE:
                cut = len(text) * 9 // 10
                yield text[cut:] if split == "val" else text[:cut]
            elif held_out(text) == (split == "val"):
                yield text


def held_out(text: str) -> bool:
    """One text in ten."""
    return hashlib.sha256(text.encode()).digest()[0] < 256 / 10


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it, or leave it out") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def stdlib(path: None = None) -> Source:
    """The Python standard library's own source, about 11 MB on every machine, without its tests."""
    if path is not None:
        raise DataError(f"data.path={path} is for your own text: add data=text")
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not NOT_SOURCE & set(file.relative_to(root).parts)]
    if not files:
        raise DataError(f"data=stdlib: no .py files in {root}; choose data=text data.path=...")
    return Source("stdlib", files)


def text(path: str | list[str] | None) -> Source:
    """Files, folders (searched for .txt, .md and .py) and globs."""
    patterns = [path] if isinstance(path, str | int | float) else path  # 2024 is a name, too
    if not patterns or not isinstance(patterns, list):
        raise DataError("data=text needs data.path=FILE, a folder, a glob, or a list '[a.txt,b/]'")
    files = {file for pattern in patterns for file in matches(str(pattern))}
    return Source("text", files)


def matches(pattern: str) -> list[Path]:
    """The text files that one entry of data.path means."""
    path = Path(pattern).expanduser()
    names = [path] if path.exists() else glob.glob(str(path), recursive=True)
    found = [Path(name).resolve() for name in names]
    if not found:
        raise DataError(f"data.path={pattern}: no such file or folder, and nothing matches it as a glob")
    files = []
    for path in found:
        files += folder_files(path) if path.is_dir() else [path]
    if wrong := [file for file in files if file.suffix not in SUFFIXES]:
        raise DataError(f"data.path={pattern}: {wrong[0].name} is none of {', '.join(SUFFIXES)}")
    if not files:
        raise DataError(f"data.path={pattern}: holds no {', '.join(SUFFIXES)} file")
    return files


def folder_files(folder: Path) -> list[Path]:
    """The text files below a folder, but for those in hidden folders (.git, .venv)."""
    files = (file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


SOURCES = {"stdlib": stdlib, "text": text}
