"""Text in, batches of token ids out: corpus.py -> tokenizer.py -> shards.py -> loader.py."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data.corpus import SOURCES, Source
from data.errors import DataError
from data.shards import Shard, open_shards, write_split
from data.tokenizer import TOKENIZERS, Tokenizer


@dataclass
class DataConfig:
    source: str  # a name in SOURCES
    path: Any  # data=text: a file, a folder, a glob, or a list of them
    tokenizer: str  # a name in TOKENIZERS
    cache: str  # the folder for token shards

    def __post_init__(self):
        for key, known in (("source", SOURCES), ("tokenizer", TOKENIZERS)):
            if getattr(self, key) not in known:
                raise DataError(f"data.{key}={getattr(self, key)}: choose {' or '.join(known)}")


class Dataset(NamedTuple):
    """A tokenized corpus: its two splits are lists of shards."""

    name: str
    tokenizer: Tokenizer
    train: list[Shard]
    val: list[Shard]


def open_dataset(config: DataConfig) -> Dataset:
    """The corpus as verified token shards, written on the first use. DataError: no such text, or a damaged shard."""
    source = SOURCES[config.source](config.path)
    tokenizer = TOKENIZERS[config.tokenizer]()
    folder = Path(config.cache) / f"{source.name}-{tokenizer.name}-{fingerprint(source, tokenizer)}"
    for split in ("train", "val"):
        write_split(folder, split, (tokenizer.encode(text) for text in source.documents(split)), tokenizer.eot)
    return Dataset(
        source.name, tokenizer, *(open_shards(folder, split, tokenizer.n_vocab) for split in ("train", "val"))
    )


def fingerprint(source: Source, tokenizer: Tokenizer) -> str:
    """12 hex digits that change with any file's name, size or time, and with the tokenizer."""
    try:
        stats = [(str(path), path.stat()) for path in source.files]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps([files, tokenizer.name]).encode()).hexdigest()[:12]
