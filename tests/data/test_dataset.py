"""From the config to shards: which changes give another data set, and when the shards are written."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from data import DataConfig, open_dataset, prepare_command, read_choice
from data.corpus import text_source
from data.errors import DataError
from data.loader import Windows
from data.shards import digest
from tests.data.test_corpus import texts_of

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def data_config(tmp_path, choice="text", **changes):
    """Return a choice of the config group `data`, with the tokenizer `bytes` and a cache in `tmp_path`."""
    defaults = OmegaConf.to_container(read_choice(choice))
    return DataConfig(**defaults | {"tokenizer": "bytes", "cache": str(tmp_path / "cache")} | changes)


def test_the_shards_hold_every_document(folder, tmp_path):
    """The tokens are decoded again. An eot comes before every document, so nothing is before the first eot."""
    dataset = open_dataset(data_config(tmp_path, path=str(folder)))
    for split in ("train", "val"):
        tokens = np.concatenate([shard.tokens for shard in getattr(dataset, split)])
        documents = np.split(tokens, np.flatnonzero(tokens == dataset.tokenizer.eot))
        texts = [dataset.tokenizer.decode(document.tolist()) for document in documents]
        assert texts[1:] == texts_of(text_source(str(folder)), split)


def test_a_changed_file_is_tokenized_again(folder, tmp_path):
    config = data_config(tmp_path, path=str(folder))
    first_path = open_dataset(config).train[0].path
    assert open_dataset(config).train[0].path == first_path
    file = folder / "part0" / "00.txt"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert open_dataset(config).train[0].path != first_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "web"}, "data.source=web: choose stdlib or text or hub or nanogpt"),
        ({"tokenizer": "llama"}, "data.tokenizer=llama: choose bytes or gpt2"),
        ({"prepare": "never"}, "data.prepare=never: choose auto or by_hand"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0: it must be above 0 and at most 1"),
        ({"val_fraction": 1.1}, "data.val_fraction=1.1: it must be above 0 and at most 1"),
        ({"name": "a/b"}, "data.name=a/b: it names a folder in data.cache, so it must not be empty, or contain /"),
        ({"name": "a\0"}, "so it must not be empty, or contain / or control characters"),
    ],
)
def test_an_impossible_config_value_is_an_error(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        data_config(tmp_path, **changes)


def test_another_column_or_val_fraction_gives_another_data_set(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"a": "a{i}", "b": "b{i}"}}\n' for i in range(99)))
    path = str(tmp_path / "a.jsonl")
    a = open_dataset(data_config(tmp_path, path=path, column="a", val_fraction=0.2))
    b = open_dataset(data_config(tmp_path, path=path, column="b", val_fraction=0.2))
    a_with_more_val = open_dataset(data_config(tmp_path, path=path, column="a", val_fraction=0.5))
    assert len({dataset.train[0].path for dataset in (a, b, a_with_more_val)}) == 3
    assert a.train[0].tokens[1] == ord("a")
    assert b.train[0].tokens[1] == ord("b")
    assert sum(map(len, a_with_more_val.val)) > sum(map(len, a.val))


def test_the_fingerprint_depends_only_on_the_tokens(folder, tmp_path):
    """The same text has the same fingerprint in another folder, with other file times, and in another cache."""
    dataset = open_dataset(data_config(tmp_path, path=str(folder)))
    fingerprint = dataset.fingerprint
    assert (fingerprint["train"], fingerprint["val"]) == (digest(dataset.train), digest(dataset.val))
    assert fingerprint["train"] != fingerprint["val"]
    assert {key: fingerprint[key] for key in ("name", "tokenizer")} == {"name": "text", "tokenizer": "bytes"}
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    moved = folder.rename(tmp_path / "moved")
    for file in moved.rglob("*.*"):
        os.utime(file, ns=(0, 0))
    moved_config = data_config(tmp_path, path=str(moved), cache=str(tmp_path / "other"))
    assert open_dataset(moved_config).fingerprint == fingerprint
    (moved / "part0" / "00.txt").write_text("another")
    changed = open_dataset(moved_config).fingerprint
    assert (changed["train"], changed["val"]) != (fingerprint["train"], fingerprint["val"])


@pytest.mark.parametrize("few_files", [True, False])
def test_all_text_is_for_validation_when_val_fraction_is_1(folder, tmp_path, few_files):
    """With a smaller val_fraction 2 files are cut, and 30 are split by hash. The second call opens existing shards."""
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("0123456789")
    (tmp_path / "few" / "b.txt").write_text("abc")
    path = str(tmp_path / "few" if few_files else folder)
    text_bytes = sum(len(text.encode()) for text in texts_of(text_source(path)))
    for _ in range(2):
        dataset = open_dataset(data_config(tmp_path, path=path, val_fraction=1))
        assert dataset.train == []
        assert sum(map(len, dataset.val)) == text_bytes + (2 if few_files else 30)  # and an eot for each document
    message = r"there is no training text: data.val_fraction=1 puts all text into validation"
    with pytest.raises(DataError, match=message):
        Windows(dataset.train, 4, "training")


def test_every_choice_has_every_key():
    """--help shows the comments of stdlib.yaml."""
    for path in CONFIGS.glob("*.yaml"):
        values = read_choice(path.stem)
        assert values.name == path.stem
        assert list(values) == list(DataConfig.__dataclass_fields__)
    assert (CONFIGS / "stdlib.yaml").read_text().count(" #") == len(DataConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("choice", "changes", "command"),
    [
        ("fineweb_edu", {}, "data=fineweb_edu"),
        ("fineweb_edu", {"column": "body", "path": "a b"}, "data=fineweb_edu 'data.path=\"a b\"' data.column=body"),
        ("hub", {"path": "o/n", "prepare": "auto"}, "data=hub data.path=o/n data.prepare=auto"),
        ("tinystories", {"subset": "x", "tokenizer": "bytes"}, "data=tinystories data.subset=x data.tokenizer=bytes"),
    ],
)
def test_prepare_command_names_every_changed_key(tmp_path, choice, changes, command):
    defaults = OmegaConf.to_container(read_choice(choice))
    assert prepare_command(DataConfig(**defaults | changes)) == f"python -m scripts.prepare {command}"


def test_a_path_with_data_stdlib_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"data.path=book.txt is for your own text: add data=text"):
        open_dataset(data_config(tmp_path, "stdlib", path="book.txt"))


@pytest.mark.parametrize("choice", ["fineweb_edu", "openwebtext", "tinystories"])
def test_a_large_data_set_that_is_not_prepared_is_an_error(tmp_path, choice):
    """The error comes at once, without a request to the network."""
    message = rf"data={choice} is not prepared, .*run `python -m scripts.prepare data={choice} "
    with pytest.raises(DataError, match=message):
        open_dataset(data_config(tmp_path, choice))


def write_nanogpt_files(folder):
    """Write nanoGPT's two files into a new folder, and return the folder."""
    folder.mkdir()
    np.arange(100, dtype=np.uint16).tofile(folder / "train.bin")
    np.arange(50, dtype=np.uint16).tofile(folder / "val.bin")
    return folder


def test_nanogpt_files_are_opened_in_place(tmp_path):
    """The fingerprint does not depend on the folder."""
    a = open_dataset(data_config(tmp_path, "nanogpt", path=str(write_nanogpt_files(tmp_path / "a"))))
    b = open_dataset(data_config(tmp_path, "nanogpt", path=str(write_nanogpt_files(tmp_path / "b"))))
    assert a.train[0].path == tmp_path / "a" / "train.bin"
    assert a.val[0].tokens.tolist() == list(range(50))
    assert a.fingerprint == b.fingerprint
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_a_path_without_nanogpt_files_is_an_error(tmp_path):
    for path, message in (
        (None, "data=nanogpt needs data.path=FOLDER"),
        ("", "data=nanogpt needs data.path=FOLDER"),
        (str(tmp_path), "the folder has no train.bin; data=nanogpt reads nanoGPT's train.bin and val.bin"),
    ):
        with pytest.raises(DataError, match=message):
            open_dataset(data_config(tmp_path, "nanogpt", path=path))
    (write_nanogpt_files(tmp_path / "char") / "meta.pkl").write_bytes(b"")
    with pytest.raises(DataError, match=r"the folder has a meta.pkl, so its ids are characters"):
        open_dataset(data_config(tmp_path, "nanogpt", path=str(tmp_path / "char")))
