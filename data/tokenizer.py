"""The built-in tokenizers: `bytes`, which needs no files, and `gpt2`, OpenAI's byte-pair encoding by tiktoken."""

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

from common.terminal import class_and_message, warn
from data.errors import DataError
from data.shards import id_dtype

GPT2_FILES = (
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
)
NEWLINE_IN_TEXT = re.compile(r"\S\n(?=\S)")  # a newline between two characters that are not white space
PIECE_CHARACTERS = 1 << 19  # the length of a piece: about 25 ms of work


class Tokenizer(ABC):
    """Converts text into ids below n_vocab and back. `eot` is the id that opens every document.

    A tokenizer can be pickled, because worker processes use it.
    """

    name: str
    n_vocab: int
    eot: int

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, (n,) of `dtype`, without eot."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the ids of a prompt, (n,) of `dtype`. A tokenizer.json may name ids before it, as Llama 3's does."""
        return self.encode(text)

    @property
    def dtype(self) -> type:
        """The dtype of ids in arrays: uint16, or uint32 for more than 65,536 ids."""
        return id_dtype(self.n_vocab)

    @property
    def files(self) -> dict[str, bytes]:
        """The files that a folder needs to have this tokenizer, name -> content. The built-in ones need none."""
        return {}

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end a generated text."""
        return (self.eot,)

    @abstractmethod
    def decode_bytes(self, ids: list[int]) -> bytes:
        """Return the text of `ids` as UTF-8. Skips eot and ids of n_vocab or more (a model's padding)."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, with U+FFFD for bytes that are no text."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of bytes of text that each id stands for, (n_vocab,) int64."""
        return np.array([len(self.decode_bytes([i])) for i in range(self.n_vocab)], np.int64)


class Bytes(Tokenizer):
    """The UTF-8 bytes 0 to 255, and 256 for eot."""

    name, n_vocab, eot = "bytes", 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(i for i in ids if i < 256)


class GPT2(Tokenizer):
    """tiktoken's gpt2. Raises DataError if its two files are not in tiktoken's cache and cannot be downloaded."""

    name, n_vocab, eot = "gpt2", 50257, 50256

    def __init__(self):
        import tiktoken

        no_vocabulary = DataError(
            "the tokenizer gpt2 needs GPT-2's vocabulary, which is not cached here and cannot be downloaded: set "
            "TIKTOKEN_CACHE_DIR to a folder that tiktoken filled on a machine with a network"
        )
        if not all(file.is_file() for file in gpt2_files()) and not is_reachable(GPT2_FILES[0], seconds=1):
            raise no_vocabulary
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # from requests, or from tiktoken if a file's hash is wrong
            raise no_vocabulary from error

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return self.encoding.decode_bytes([i for i in ids if i < self.eot])


def split_into_pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut `text` into pieces of at least `size` characters. Only the last piece may be shorter.

    The ids of the pieces, one after another, are the ids of the whole text. For this, each cut is after a newline
    between two characters that are not white space. GPT-2's pattern separates such a newline from its neighbours: it
    joins a newline only to white space, and it has no look-behind.
    """
    start = 0
    while len(text) - start > size:
        newline = NEWLINE_IN_TEXT.search(text, start + size - 2)  # a match has 2 characters
        if newline is None:
            break
        yield text[start : newline.end()]
        start = newline.end()
    yield text[start:]


def byte_characters() -> list[str]:
    """Return the character for each byte in GPT-2's files: its own if Latin-1 prints it, otherwise one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def gpt2_files() -> list[Path]:
    """Return the places of GPT-2's merges and vocabulary in tiktoken's cache, in the order of GPT2_FILES."""
    fallback = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", fallback)))
    return [folder / hashlib.sha1(url.encode()).hexdigest() for url in GPT2_FILES]  # tiktoken's names for the files


def is_reachable(url: str, seconds: float) -> bool:
    """Return whether `url` answers within `seconds`. Any answer counts, even an error status."""
    import requests

    answers = []

    def send_request():
        try:
            requests.head(url, timeout=seconds)
            answers.append(True)
        except requests.RequestException:
            answers.append(False)
        except Exception as error:  # of the settings of this machine, such as REQUESTS_CA_BUNDLE
            warn(f"{url} cannot be asked: {class_and_message(error)}")

    thread = threading.Thread(target=send_request, daemon=True)  # the look-up of a host name has no timeout
    thread.start()
    thread.join(seconds)
    return answers == [True]


# The built-in ones. data/tokenizer_json.py opens others
TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2}
