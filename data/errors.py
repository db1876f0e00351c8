"""DataError, and the texts of its messages."""

import sys
from pathlib import Path

from common.terminal import one_line


class DataError(ValueError):
    """A text, a tokenizer file or a token shard cannot be used. The message is one line for the user."""

    def __init__(self, message: str):
        super().__init__(message.replace("\n", "\\x0a"))  # a path or a column may hold a line feed


class BadText(DataError):
    """The content of a file is wrong, so its tokens can never be completed. Other DataErrors may be temporary."""


def read_error(path: Path, error: Exception) -> DataError:
    """Return the DataError of a file that cannot be read.

    It is a BadText if the operating system could read the file, but a library found its content wrong.
    """
    if isinstance(error, MemoryError):
        return DataError(f"{path} cannot be read: the memory is full; end other programs, or cut its documents")
    content_is_wrong = getattr(error, "errno", None) is None
    return (BadText if content_is_wrong else DataError)(f"{path} cannot be read: {one_line(error)}")


def hub_error(error: Exception) -> str:
    """Return one_line(error) with the path of its file. If the file is in Hugging Face's cache, say how to move it."""
    if isinstance(error, StopIteration):  # of `datasets`
        return "it has no rows"
    name = getattr(error, "filename", None)
    if name is None:
        return one_line(error)
    path = Path(name).absolute()
    settings = ("huggingface_hub.constants", "HF_HUB_CACHE"), ("datasets.config", "HF_DATASETS_CACHE")
    caches = [Path(getattr(sys.modules[module], key)).absolute() for module, key in settings if module in sys.modules]
    # A folder above the cache may be a file or a broken link
    in_cache = any(path.is_relative_to(cache) or cache.is_relative_to(path) for cache in caches)
    advice = "; set HF_HOME to a folder that can be written" if in_cache else ""
    return f"{name}: {one_line(error)}{advice}"
