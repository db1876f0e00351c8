"""Tokenizers: `bytes`, which needs nothing, and `gpt2`, OpenAI's byte-pair encoding by tiktoken."""

import hashlib
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from data.errors import DataError

GPT2_FILES = [
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
]


class Tokenizer(ABC):
    """Text <-> ids below n_vocab; `eot` opens every document."""

    name: str
    n_vocab: int
    eot: int

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """uint16 ids, without eot."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text; ids that mean none (eot, the padding of the vocabulary) are left out."""


class Bytes(Tokenizer):
    """UTF-8 bytes 0 to 255, and 256 for end of text."""

    name, n_vocab, eot = "bytes", 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class GPT2(Tokenizer):
    """tiktoken's gpt2. DataError: its two files are neither cached nor to be had."""

    name, n_vocab, eot = "gpt2", 50257, 50256

    def __init__(self):
        import tiktoken

        if not cached() and not reachable(GPT2_FILES[0]):
            raise DataError(
                "data.tokenizer=gpt2 needs GPT-2's vocabulary, which is not cached here and cannot be downloaded: set "
                "TIKTOKEN_CACHE_DIR to a folder that tiktoken filled on a machine with a network, or choose "
                "data.tokenizer=bytes"
            )
        self.encoding = tiktoken.get_encoding("gpt2")

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode([i for i in ids if i < self.eot])


def cached() -> bool:
    """Whether tiktoken's cache holds GPT-2's files (it names them by the SHA-1 of their address)."""
    fallback = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", fallback)))
    return all((folder / hashlib.sha1(url.encode()).hexdigest()).exists() for url in GPT2_FILES)


def reachable(url: str, seconds: float = 1.5) -> bool:
    """Whether `url` answers in time. In a thread, because looking up a name has no timeout of its own."""
    import requests

    answers = []

    def ask():
        try:
            answers.append(requests.head(url, timeout=seconds).ok)
        except requests.RequestException:
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers == [True]


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2}
