"""Tokenizers: `bytes`, which needs nothing, and `gpt2`, OpenAI's byte-pair encoding by tiktoken."""

import contextlib
import hashlib
import os
import re
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from data.errors import DataError

GPT2_FILES = {  # address -> SHA-256, as in tiktoken
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe": (
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    ),
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json": (
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    ),
}


NEWLINE = re.compile(r"\S\n(?=\S)")
PIECE = 1 << 19  # characters: about 25 ms of work


class Tokenizer(ABC):
    """Text <-> ids below n_vocab; `eot` opens every document. It can be pickled."""

    name: str
    n_vocab: int
    eot: int

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """uint16 ids, without eot."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text; ids that mean none (eot, the padding of the vocabulary) are left out."""

    @cached_property
    @abstractmethod
    def lengths(self) -> np.ndarray:
        """(n_vocab,) int64: the bytes of text that each id stands for; 0 for ids that mean none."""


class Bytes(Tokenizer):
    """UTF-8 bytes 0 to 255, and 256 for end of text."""

    name, n_vocab, eot = "bytes", 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    @cached_property
    def lengths(self) -> np.ndarray:
        return (np.arange(self.n_vocab) < self.eot).astype(np.int64)


class GPT2(Tokenizer):
    """tiktoken's gpt2. DataError: its two files are neither cached nor to be had."""

    name, n_vocab, eot = "gpt2", 50257, 50256

    def __init__(self):
        import tiktoken

        missing = DataError(
            "the tokenizer gpt2 needs GPT-2's vocabulary, which is not cached here and cannot be downloaded: set "
            "TIKTOKEN_CACHE_DIR to a folder that tiktoken filled on a machine with a network"
        )
        if not cached() and not reachable(next(iter(GPT2_FILES))):
            raise missing
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # requests' errors, and tiktoken's for a file of another hash
            raise missing from error

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode([i for i in ids if i < self.eot])

    @cached_property
    def lengths(self) -> np.ndarray:
        lengths = np.zeros(self.n_vocab, np.int64)
        for i in range(self.eot):
            with contextlib.suppress(KeyError):  # of a smaller vocabulary
                lengths[i] = len(self.encoding.decode_single_token_bytes(i))
        return lengths


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """`text` in parts of at least `size` characters (the last one may be shorter), whose ids are those of the whole.

    It is cut behind a newline between two characters that are not white space. GPT-2's pattern makes such a newline a
    token by itself (nothing but the white space around it could join it), and never looks back.
    """
    start = 0
    while len(text) - start > size and (cut := NEWLINE.search(text, start + size - 2)):
        yield text[start : cut.start() + 2]
        start = cut.start() + 2
    yield text[start:]


def cached() -> bool:
    """Whether tiktoken's cache holds GPT-2's files, whole (it names them by the SHA-1 of their address)."""
    fallback = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", fallback)))
    files = {folder / hashlib.sha1(url.encode()).hexdigest(): digest for url, digest in GPT2_FILES.items()}
    return all(file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == d for file, d in files.items())


def reachable(url: str, seconds: float = 1.0) -> bool:
    """Whether `url` answers in time, whatever it says. In a thread: looking up a name has no timeout."""
    import requests

    answers = []

    def ask():
        try:
            requests.head(url, timeout=seconds)
            answers.append(True)
        except requests.RequestException:
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers == [True]


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2}
