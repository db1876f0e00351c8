"""From the config to shards: what is one data set and what is another, and who writes it when."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from data import DataConfig, open_dataset, prepare_command
from data.corpus import text
from data.errors import DataError
from data.loader import Windows
from tests.data.test_corpus import of

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def config(tmp_path, choice="text", **changes):
    """A group's file, with the byte tokenizer and a cache of the test's own."""
    settings = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{choice}.yaml"))
    return DataConfig(**settings | {"tokenizer": "bytes", "cache": str(tmp_path / "cache")} | changes)


def test_a_dataset_is_its_text(folder, tmp_path):
    """From files to shards and back: every document, each behind an end of text."""
    dataset = open_dataset(config(tmp_path, path=str(folder)))
    for split in ("train", "val"):
        tokens = np.concatenate([shard.tokens for shard in getattr(dataset, split)])
        documents = [
            dataset.tokenizer.decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == 256))
        ]
        assert documents[1:] == of(text(str(folder)), split)


def test_a_changed_file_is_tokenized_again(folder, tmp_path):
    settings = config(tmp_path, path=str(folder))
    first = open_dataset(settings).train[0].path
    assert open_dataset(settings).train[0].path == first
    file = folder / "part0" / "00.txt"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert open_dataset(settings).train[0].path != first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "web"}, "data.source=web: choose stdlib or text or hub or nanogpt"),
        ({"tokenizer": "llama"}, "data.tokenizer=llama: choose bytes or gpt2"),
        ({"prepare": "never"}, "data.prepare=never: choose auto or by_hand"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0: it must be above 0 and at most 1"),
        ({"val_fraction": 1.1}, "data.val_fraction=1.1: it must be above 0 and at most 1"),
        ({"name": "a/b"}, "data.name=a/b: it names a folder below data.cache, and holds no /"),
    ],
)
def test_unknown_names(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        config(tmp_path, **changes)


def test_another_column_or_fraction_is_another_data_set(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"a": "a{i}", "b": "b{i}"}}\n' for i in range(99)))
    a, b, more = (
        open_dataset(config(tmp_path, path=str(tmp_path / "a.jsonl"), column=column, val_fraction=fraction))
        for column, fraction in (("a", 0.2), ("b", 0.2), ("a", 0.5))
    )
    assert len({dataset.train[0].path for dataset in (a, b, more)}) == 3
    assert a.train[0].tokens[1] == ord("a")
    assert b.train[0].tokens[1] == ord("b")
    assert sum(map(len, more.val)) > sum(map(len, a.val))


def test_the_fingerprint_is_of_the_tokens(folder, tmp_path):
    """The same text elsewhere, at another time and in another cache is the same data; another text is not."""
    here = open_dataset(config(tmp_path, path=str(folder))).fingerprint
    assert {key: here[key] for key in ("name", "tokenizer")} == {"name": "text", "tokenizer": "bytes"}
    assert json.loads(json.dumps(here)) == here
    moved = folder.rename(tmp_path / "moved")
    for file in moved.rglob("*.*"):
        os.utime(file, ns=(0, 0))
    there = config(tmp_path, path=str(moved), cache=str(tmp_path / "other"))
    assert open_dataset(there).fingerprint == here
    (moved / "part0" / "00.txt").write_text("another")
    changed = open_dataset(there).fingerprint
    assert (changed["train"], changed["val"]) != (here["train"], here["val"])


@pytest.mark.parametrize("plain", [True, False])
def test_all_of_it_may_be_for_validation(folder, tmp_path, plain):
    """Every document, by position and by hash; nothing is to train on. The second time it is there."""
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("0123456789")
    (tmp_path / "few" / "b.txt").write_text("abc")
    path = str(tmp_path / "few" if plain else folder)
    for _ in range(2):
        dataset = open_dataset(config(tmp_path, path=path, val_fraction=1))
        documents = list(text(path).documents())
        assert dataset.train == []
        assert sum(map(len, dataset.val)) == sum(len(each.encode()) for _, each in documents) + (2 if plain else 30)
    with pytest.raises(DataError, match=r"there is no training text: data.val_fraction=1 holds all of it out"):
        Windows(dataset.train, 4, "training")


def test_every_file_of_the_group_has_every_key_and_one_comment_a_key():
    """The comments, because --help shows one for all of them."""
    comments = set()
    for path in CONFIGS.glob("*.yaml"):
        assert OmegaConf.load(path).name == path.stem
        comments.add(tuple((line.split(":")[0], line.partition(" #")[2]) for line in path.read_text().splitlines()[1:]))
    assert len(comments) == 1
    assert [key for key, _ in comments.pop()] == list(DataConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("choice", "changes", "command"),
    [
        ("fineweb_edu", {}, "data=fineweb_edu"),
        ("fineweb_edu", {"column": "body", "path": "a b"}, "data=fineweb_edu 'data.path=a b' data.column=body"),
        ("hub", {"path": "o/n", "prepare": "auto"}, "data=hub data.path=o/n data.prepare=auto"),
        ("tinystories", {"subset": "x", "tokenizer": "bytes"}, "data=tinystories data.subset=x data.tokenizer=bytes"),
    ],
)
def test_the_command_prepares_exactly_this(tmp_path, choice, changes, command):
    usual = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{choice}.yaml"))
    assert prepare_command(DataConfig(**usual | changes)) == f"python -m scripts.prepare {command}"


@pytest.mark.parametrize("choice", ["fineweb_edu", "openwebtext", "tinystories"])
def test_a_large_set_is_prepared_by_hand(tmp_path, choice):
    """train.py says so at once, and asks no network."""
    with pytest.raises(
        DataError, match=rf"data={choice} is not prepared, .*run `python -m scripts.prepare data={choice} "
    ):
        open_dataset(config(tmp_path, choice))


def nanogpt(folder):
    folder.mkdir()
    np.arange(100, dtype=np.uint16).tofile(folder / "train.bin")
    np.arange(50, dtype=np.uint16).tofile(folder / "val.bin")
    return folder


def test_nanogpts_files_are_a_data_set(tmp_path):
    """In place, and the same data wherever they lie."""
    here, there = (open_dataset(config(tmp_path, "nanogpt", path=str(nanogpt(tmp_path / name)))) for name in "ab")
    assert here.train[0].path == tmp_path / "a" / "train.bin"
    assert here.val[0].tokens.tolist() == list(range(50))
    assert here.fingerprint == there.fingerprint
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_what_is_not_nanogpts(tmp_path):
    for path, message in (
        (None, "data=nanogpt needs data.path=FOLDER"),
        ("", "data=nanogpt needs data.path=FOLDER"),
        ("~nobody-here/x", "data.path=~nobody-here/x: there can be no such file or folder: Could not determine home"),
        (str(tmp_path), "holds no train.bin; data=nanogpt reads nanoGPT's train.bin and val.bin"),
    ):
        with pytest.raises(DataError, match=message):
            open_dataset(config(tmp_path, "nanogpt", path=path))
    (nanogpt(tmp_path / "char") / "meta.pkl").write_bytes(b"")
    with pytest.raises(DataError, match=r"by its meta.pkl its ids are characters"):
        open_dataset(config(tmp_path, "nanogpt", path=str(tmp_path / "char")))
