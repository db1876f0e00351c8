"""DataError, and the texts of its messages."""

import errno
import os
import sys
from pathlib import Path

from common.terminal import one_line


class DataError(ValueError):
    """A text, a tokenizer file or a token shard cannot be used. The message is one line for the user."""

    def __init__(self, message: str):
        super().__init__(message.replace("\n", "\\x0a"))  # a path or a column may hold a line feed


class BadText(DataError):
    """The content of a file is wrong, so its tokens can never be completed. Other DataErrors may be temporary."""


def read_error(path: Path, error: Exception, remedy: str = "end other programs") -> DataError:
    """Return the DataError of a file that cannot be read. `remedy` is against full memory.

    It is a BadText if the operating system could read the file, but a library found its content wrong.
    """
    if isinstance(error, MemoryError):
        return DataError(f"{path} cannot be read: the memory is full; {remedy}")
    content_is_wrong = getattr(error, "errno", None) is None
    return (BadText if content_is_wrong else DataError)(f"{path} cannot be read: {one_line(error)}")


def hub_error(error: Exception) -> str:
    """Return one_line(error) with the path of its file. If the file cannot be written, say what to do."""
    path = getattr(error, "filename", None)
    if path is None:
        return one_line(error)
    advice = "; set HF_HOME to a folder that can be written" if cannot_write(error) else ""
    return f"{path}: {one_line(error)}{advice}"


def cannot_write(error: Exception) -> bool:
    """Return whether Hugging Face's cache cannot be written: it is read-only, full, or behind a broken link."""
    if not isinstance(error, OSError) or error.filename is None or os.path.isfile(error.filename):
        return False
    path = Path(error.filename).absolute()
    if not any(path.is_relative_to(folder) or folder.is_relative_to(path) for folder in cache_folders()):
        return False
    if error.errno == errno.ENOENT:
        return not os.path.isdir(os.path.dirname(error.filename))
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)


def cache_folders() -> list[Path]:
    """Return the folders in which Hugging Face's libraries, if they are imported, keep files."""
    settings = ("huggingface_hub.constants", "HF_HUB_CACHE"), ("datasets.config", "HF_DATASETS_CACHE")
    return [Path(getattr(sys.modules[module], name)).absolute() for module, name in settings if module in sys.modules]
