"""Text in, batches of token ids out: corpus.py, hub.py -> tokenizer.py -> pipeline.py, shards.py -> loader.py."""

import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from data.corpus import Source, local, stdlib, text
from data.errors import DataError
from data.hub import Hub
from data.pipeline import complete, recorded, write
from data.shards import Shard, digest, open_nanogpt, open_shards
from data.tokenizer import TOKENIZERS, Tokenizer

SOURCES = {"stdlib": stdlib, "text": text, "hub": Hub}
CONFIGS = Path(__file__).parent.parent / "configs" / "data"


@dataclass
class DataConfig:
    name: str  # the group's choice; names the shards' folder
    source: str  # a name in SOURCES, or nanogpt
    path: Any  # text: a file, a folder, a glob, or a list of them; hub: owner/name; nanogpt: a folder
    subset: str | None  # hub: the data set's configuration
    column: str  # of the text, in .jsonl, .parquet and on the hub
    tokenizer: str  # a name in TOKENIZERS
    val_fraction: float  # of the documents is held out; 1: all of them, to be evaluated on
    prepare: str  # auto: by train.py, on the first use | by_hand: by scripts/prepare.py
    cache: str  # the folder for token shards
    mask_documents: bool = False  # attention stays inside documents

    def __post_init__(self):
        known = {"source": (*SOURCES, "nanogpt"), "tokenizer": TOKENIZERS, "prepare": ("auto", "by_hand")}
        for key, names in known.items():
            if getattr(self, key) not in names:
                raise DataError(f"data.{key}={getattr(self, key)}: choose {' or '.join(names)}")
        if not 0 < self.val_fraction <= 1:
            raise DataError(f"data.val_fraction={self.val_fraction}: it must be above 0 and at most 1")
        if not self.name or Path(self.name).name != self.name:
            raise DataError(f"data.name={self.name}: it names a folder below data.cache, and holds no /")


class Dataset(NamedTuple):
    """A tokenized corpus: its two splits are lists of shards, that for training without any if all is held out."""

    name: str
    tokenizer: Tokenizer
    train: list[Shard]
    val: list[Shard]
    fingerprint: dict[str, str]  # name, tokenizer, and a hash of each split's tokens: the same wherever the files are


def open_dataset(config: DataConfig) -> Dataset:
    """The corpus as verified token shards, a small one written on the first use.

    DataError: no such text, a damaged shard, or a large data set that is not prepared.
    """
    tokenizer = TOKENIZERS[config.tokenizer]()
    if config.source == "nanogpt":
        train, val = open_nanogpt(nanogpt_folder(config), tokenizer.n_vocab, Path(config.cache))
    else:
        source, folder = located(config, tokenizer)
        if config.prepare == "by_hand" and not complete(folder):
            raise DataError(
                f"data={config.name} is not prepared, and too large to do it in passing: run "
                f"`{prepare_command(config)}`"
            )
        write(folder, source, tokenizer, workers=1)  # a small one takes less than processes take to start
        train = open_shards(folder, "train", tokenizer.n_vocab) if config.val_fraction < 1 else []
        val = open_shards(folder, "val", tokenizer.n_vocab)
    fingerprint = {"name": config.name, "tokenizer": tokenizer.name, "train": digest(train), "val": digest(val)}
    return Dataset(config.name, tokenizer, train, val, fingerprint)


def prepare(config: DataConfig, workers: int, watch: Callable[[int, int], None]) -> Path:
    """Tokenize the corpus unless that is done, however large it is (see pipeline.write): the folder of its splits."""
    if config.source == "nanogpt":
        return nanogpt_folder(config)
    tokenizer = TOKENIZERS[config.tokenizer]()
    source, folder = located(config, tokenizer)
    write(folder, source, tokenizer, workers, watch, wait=False)
    return folder


def goes_on_after(config: DataConfig) -> int:
    """The documents that prepare() need not do again, if it was interrupted."""
    return 0 if config.source == "nanogpt" else recorded(located(config, TOKENIZERS[config.tokenizer]())[1])


def located(config: DataConfig, tokenizer: Tokenizer) -> tuple[Source, Path]:
    """The text, and where its shards belong; the 12 hex digits change with whatever would change the tokens."""
    source = SOURCES[config.source](config.path, config.subset, config.column, config.val_fraction)
    facts = json.dumps([source.identity, tokenizer.name, config.val_fraction])
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return source, Path(config.cache) / f"{config.name}-{tokenizer.name}-{fingerprint}"


def nanogpt_folder(config: DataConfig) -> Path:
    """Where nanoGPT's files are. DataError: they are not, or their ids are those of another tokenizer."""
    if not config.path or not isinstance(config.path, str):
        raise DataError("data=nanogpt needs data.path=FOLDER, with nanoGPT's train.bin and val.bin in it")
    folder = local(config.path)
    if missing := [name for name in ("train.bin", "val.bin") if not (folder / name).is_file()]:
        raise DataError(
            f"data.path={folder}: holds no {missing[0]}; data=nanogpt reads nanoGPT's train.bin and val.bin"
        )
    if (folder / "meta.pkl").exists():
        raise DataError(
            f"data.path={folder}: by its meta.pkl its ids are characters (nanoGPT's *_char sets), not tokens of "
            f"{config.tokenizer}: read the text itself with data=text data.tokenizer=bytes"
        )
    return folder


def prepare_command(config: DataConfig) -> str:
    """What prepares exactly this."""
    return shlex.join(["python", "-m", "scripts.prepare", *overrides(config)])


def overrides(config: DataConfig) -> list[str]:
    """The command line's words for exactly this: the keys that differ from those of the group's file."""
    file = CONFIGS / f"{config.name}.yaml"
    usual = OmegaConf.load(file) if file.exists() else {}
    changed = {key: value for key, value in asdict(config).items() if usual.get(key) != value}
    choice = config.name if usual else config.source
    return [f"data={choice}", *(f"data.{key}={'null' if value is None else value}" for key, value in changed.items())]
