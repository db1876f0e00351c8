"""Turn text into batches of token ids.

corpus.py and hub.py read documents, tokenizer.py and tokenizer_json.py encode them, pipeline.py and writer.py write
token shards, and loader.py cuts the shards into batches. open_dataset() and prepare() go from the config to the shards
of a corpus.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from common.terminal import one_line, override, shell_command
from data.corpus import Source, stdlib_source, text_source
from data.errors import DataError
from data.hub import Hub
from data.paths import local_path
from data.pipeline import is_complete, is_missing, write_shards
from data.shards import Shard, digest, open_nanogpt_shards, open_shards
from data.tokenizer import Tokenizer
from data.tokenizer_json import check_name, open_tokenizer

CONFIGS = Path(__file__).parent.parent / "configs" / "data"


@dataclass
class DataConfig:
    """The keys of the config group `data`. Raises DataError if a value is not allowed."""

    name: str  # the chosen file in configs/data; the name of the shards' folder starts with it
    source: str  # stdlib | text | hub | nanogpt
    path: Any  # text: a file, a folder, a glob, or a list of them; hub: owner/name; nanogpt: a folder
    subset: str | None  # hub: the data set's configuration
    column: str  # the column that holds the text, in .jsonl, .parquet and on the hub
    tokenizer: str  # bytes | gpt2 | a folder with tokenizer.json | owner/name on the hub
    val_fraction: float  # the share of documents for validation; 1: all documents, for evaluation only
    prepare: str  # auto: open_dataset() writes the shards on the first use | by_hand: only scripts.prepare does
    cache: str  # the folder for token shards
    encoding_errors: str = "strict"  # strict | replace | skip: text files that are not UTF-8
    mask_documents: bool = False  # true: attention does not cross the end of a document

    def __post_init__(self):
        choices = {
            "source": ("stdlib", "text", "hub", "nanogpt"),
            "prepare": ("auto", "by_hand"),
            "encoding_errors": ("strict", "replace", "skip"),
        }
        for key, names in choices.items():
            if getattr(self, key) not in names:
                raise DataError(f"data.{key}={getattr(self, key)}: choose {' or '.join(names)}")
        check_name(self.tokenizer, "data.tokenizer")
        if not 0 < self.val_fraction <= 1:
            raise DataError(f"data.val_fraction={self.val_fraction}: it must be above 0 and at most 1")
        if not self.name or Path(self.name).name != self.name or not self.name.isprintable():
            raise DataError(
                f"data.name={self.name}: it names a folder in data.cache, so it must not be empty, or contain / or "
                "control characters"
            )


class Dataset(NamedTuple):
    """A tokenized corpus. Each split is a list of shards; `train` is empty if data.val_fraction is 1."""

    name: str
    tokenizer: Tokenizer
    train: list[Shard]
    val: list[Shard]
    fingerprint: dict[str, str]  # name, tokenizer, and a hash of each split's tokens; it holds no paths and no times

    @property
    def summary(self) -> str:
        """The name, the tokenizer, and the number of tokens of each split, for the user."""
        train_tokens, val_tokens = sum(map(len, self.train)), sum(map(len, self.val))
        return f"{self.name}, {self.tokenizer.name}: {train_tokens:,} training tokens, {val_tokens:,} validation tokens"


def open_dataset(config: DataConfig, verify: bool = False) -> Dataset:
    """Open the corpus as verified token shards. If data.prepare is auto, write the shards on the first use.

    A large shard is only read if its size or time changed, or with `verify`. Raises DataError if the text is missing,
    if a shard is damaged, or if data.prepare is by_hand and no shards exist.
    """
    tokenizer = open_tokenizer(config.tokenizer, "data.tokenizer")
    if config.source == "nanogpt":
        train, val = open_nanogpt_shards(nanogpt_folder(config), tokenizer.n_vocab, Path(config.cache), verify)
    else:
        source, folder = source_and_folder(config, tokenizer)
        if config.prepare == "by_hand" and not is_complete(folder):
            raise DataError(
                f"data={config.name} is not prepared, and it is too large to prepare on the first use: run "
                f"`{prepare_command(config)}`"
            )
        write_shards(folder, source, tokenizer, workers=1)  # starting processes takes longer than a small corpus
        train = open_shards(folder, "train", tokenizer.n_vocab, verify) if config.val_fraction < 1 else []
        val = open_shards(folder, "val", tokenizer.n_vocab, verify)
    fingerprint = {"name": config.name, "tokenizer": tokenizer.name, "train": digest(train), "val": digest(val)}
    return Dataset(config.name, tokenizer, train, val, fingerprint)


def prepare(config: DataConfig, workers: int, watch: Callable[[int, int], None]) -> Path:
    """Tokenize a corpus of any size unless its shards exist, and return the folder of its splits.

    Calls `watch(documents, tokens)` with the numbers so far. Raises DataError if another process prepares the same
    corpus, if the source or the disk fails, or if a split would be empty. For data=nanogpt, returns the folder of
    nanoGPT's files.
    """
    if config.source == "nanogpt":
        return nanogpt_folder(config)
    tokenizer = open_tokenizer(config.tokenizer, "data.tokenizer")
    source, folder = source_and_folder(config, tokenizer)
    write_shards(folder, source, tokenizer, workers, watch, wait=False)
    return folder


def source_and_folder(config: DataConfig, tokenizer: Tokenizer) -> tuple[Source, Path]:
    """Return the source of the text and the folder of its shards.

    The folder's name ends with 12 hex digits of a hash. The hash covers everything that can change the tokens.
    """
    try:
        source = make_source(config)
    except OSError as error:
        raise DataError(f"{error.filename or config.path} cannot be read: {one_line(error)}") from None
    identity = json.dumps([source.identity, tokenizer.name, config.val_fraction])
    identity_hash = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return source, Path(config.cache) / f"{config.name}-{tokenizer.name}-{identity_hash}"


def make_source(config: DataConfig) -> Source:
    """Return the source of the text. Raises DataError if data.path does not name one."""
    if config.source == "hub":
        return Hub(config.path, config.subset, config.column, config.val_fraction)
    if config.source == "text":
        return text_source(config.path, config.column, config.val_fraction, config.encoding_errors)
    if config.path is not None:
        raise DataError(f"data.path={config.path} is for your own text: add data=text")
    return stdlib_source(config.val_fraction, config.encoding_errors)


def nanogpt_folder(config: DataConfig) -> Path:
    """Return the folder of nanoGPT's files.

    Raises DataError if train.bin or val.bin is missing, or if their ids are characters and not tokens.
    """
    if not config.path or not isinstance(config.path, str):
        raise DataError("data=nanogpt needs data.path=FOLDER, with nanoGPT's train.bin and val.bin in it")
    folder = local_path(config.path)
    if missing := [name for name in ("train.bin", "val.bin") if is_missing(folder / name)]:
        raise DataError(
            f"data.path={folder}: the folder has no {missing[0]}; data=nanogpt reads nanoGPT's train.bin and val.bin"
        )
    if os.path.lexists(folder / "meta.pkl"):
        raise DataError(
            f"data.path={folder}: the folder has a meta.pkl, so its ids are characters (nanoGPT's *_char sets) and not "
            f"tokens of {config.tokenizer}: use the text itself with data=text data.tokenizer=bytes"
        )
    return folder


def prepare_command(config: DataConfig) -> str:
    return shell_command("python", "-m", "scripts.prepare", *config_arguments(config))


def config_arguments(config: DataConfig) -> list[str]:
    """Return the arguments that give this config: data=<choice>, and data.<key>=<value> for each other value."""
    defaults = read_choice(config.name)
    arguments = [f"data={config.name if defaults else config.source}"]
    for key, value in asdict(config).items():
        if defaults.get(key) != value:
            arguments.append(override(f"data.{key}", value))
    return arguments


def read_choice(choice: str) -> DictConfig:
    """Return the keys of configs/data/<choice>.yaml, and of the file in its `defaults`; {} without such a file."""
    file = CONFIGS / f"{choice}.yaml"
    own = OmegaConf.load(file) if file.exists() else OmegaConf.create()
    return OmegaConf.merge(*map(read_choice, own.pop("defaults", [])), own)
