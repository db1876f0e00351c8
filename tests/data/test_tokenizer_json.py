"""tokenizer.json of other models: our ids and texts are those of transformers' AutoTokenizer."""

import json
import pickle

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data import DataConfig, open_dataset
from data.errors import DataError
from data.pipeline import write_shards
from data.shards import open_shards
from data.tokenizer import split_into_pieces
from data.tokenizer_json import TokenizerJson, open_tokenizer, same_tokenizer, tokenizer_size
from model.text import Text

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PRE_TOKENIZERS = {  # as in the files of these models
    "smollm2": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama3": [pre_tokenizers.Split(Regex(rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}"), "isolated"), BYTES],
    "qwen3": [pre_tokenizers.Split(Regex(rf"{LETTERS}|\p{{N}}|{REST}"), "isolated"), BYTES],
}
TEXT = "def main(x):\n    return x.strip()  # naïve 日本 🙂 12345\n\n\tThe end.\nIt's done!\r\n"
TEXTS = (TEXT * 3, "Grüße,  世界!\n\n\n 1,234.5 <|endoftext|> <|im_end|> <tool>", "".join(map(chr, range(1, 0x180))))


def encoding(kind="smollm2", size=420):
    """A small tokenizer that is trained here, with the pipeline of a real one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[kind])
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen3":
        tokenizer.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|im_end|>", "<|begin|>"]
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, **options)
    tokenizer.train_from_iterator([TEXT * 9], trainer)
    tokenizer.add_tokens(["<tool>"])
    if kind == "llama3":
        tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 2)])
    return tokenizer


def write_tokenizer(folder, kind="smollm2", settings=None, change=lambda facts: None):
    """Write the files of a tokenizer, after `change` of the JSON object."""
    folder.mkdir(exist_ok=True)
    facts = json.loads(encoding(kind).to_str())
    change(facts)
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    default = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(default if settings is None else settings))
    return folder


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_the_ids_and_the_text_are_those_of_transformers(tmp_path, kind):
    """A prompt also has the special tokens that the file puts before it; in a corpus they are text."""
    from transformers import AutoTokenizer

    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path / "a", kind)))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert (tokenizer.n_vocab, tokenizer.eot, tokenizer.stops) == (len(theirs), theirs.eos_token_id, (0,))
    for text in TEXTS:
        assert tokenizer.encode_prompt(text).tolist() == theirs(text)["input_ids"]
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert not {0, 1, 2} & {*ids.tolist()}
        assert ids.tolist() == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        expected = theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert tokenizer.decode([0, *ids.tolist(), 1, 10**6]) == expected
        assert tokenizer.lengths[ids].sum() == len(expected.encode())
        streamed = Text(tokenizer, [])
        assert "".join([*(streamed.add([i]) for i in ids.tolist()), streamed.finish()]) == expected


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_pieces_have_the_ids_of_the_whole_text(tmp_path, kind):
    tokenizer = TokenizerJson(write_tokenizer(tmp_path / "a", kind))
    whole = TEXT * 20
    pieces = list(split_into_pieces(whole, 50))
    assert len(pieces) > 10
    assert np.concatenate([tokenizer.encode(piece) for piece in pieces]).tolist() == tokenizer.encode(whole).tolist()


def test_the_name_is_of_the_content(tmp_path):
    """A copy in another folder is the same tokenizer, and another end of text makes another one."""
    first = TokenizerJson(write_tokenizer(tmp_path / "a"))
    (tmp_path / "copy").mkdir()
    for name, content in first.files.items():
        (tmp_path / "copy" / name).write_bytes(content)
    again = TokenizerJson(tmp_path / "copy")
    assert (again.name, again.eot, again.files) == (first.name, first.eot, first.files)
    assert same_tokenizer(str(tmp_path / "a"), str(tmp_path / "copy"))
    assert not same_tokenizer(str(tmp_path / "a"), "bytes")
    other = write_tokenizer(tmp_path / "b", settings={"eos_token": {"content": "<|im_end|>"}})
    assert TokenizerJson(other).eot == 1
    assert TokenizerJson(other).name != first.name
    copy = pickle.loads(pickle.dumps(first))
    assert (copy.name, copy.encode(TEXT).tolist()) == (first.name, first.encode(TEXT).tolist())
    assert len(pickle.dumps(first)) < 500  # each chunk of text takes it to a worker


@pytest.mark.parametrize(
    ("settings", "generation", "model", "stops"),
    [
        ({"eos_token": "<|im_end|>"}, {"eos_token_id": [1, 0]}, {"eos_token_id": 1}, (1, 0)),
        ({}, {"eos_token_id": [1, 0]}, None, (1, 0)),
        ({}, None, {"eos_token_id": 2}, (2,)),
        ({"eos_token": None}, None, {"eos_token_id": 2}, (2,)),
        ({"eos_token": None}, {"eos_token_id": 1}, None, (1,)),
        ({"eos_token": {"content": "<|im_end|>"}}, None, None, (1,)),
    ],
)
def test_ends_of_text(tmp_path, settings, generation, model, stops):
    """eos_token opens documents. All ends stop a text, also those of a copy."""
    folder = write_tokenizer(tmp_path / "a", settings=settings)
    for name, facts in (("generation_config", generation), ("config", model)):
        if facts is not None:
            (folder / f"{name}.json").write_text(json.dumps(facts))
    tokenizer = TokenizerJson(folder)
    assert (tokenizer.eot, tokenizer.stops) == (stops[0], stops)
    text = Text(tokenizer, [])
    assert text.add([*tokenizer.encode("ab").tolist(), stops[-1], 50]) == "ab"
    assert text.stopped
    (tmp_path / "copy").mkdir()
    for name, content in tokenizer.files.items():
        (tmp_path / "copy" / name).write_bytes(content)
    copy = TokenizerJson(tmp_path / "copy")
    assert (copy.stops, copy.name) == (stops, tokenizer.name)


@pytest.mark.parametrize(
    ("token", "bos"), [(None, None), ("<|begin|>", 2), ({"content": "<|begin|>"}, 2), ("<|none|>", None), (1, None)]
)
def test_the_beginning_of_text(tmp_path, token, bos):
    settings = {"eos_token": "<|endoftext|>", "bos_token": token}
    assert TokenizerJson(write_tokenizer(tmp_path / "a", settings=settings)).bos == bos


def test_a_folder_is_read_once_until_a_file_changes(tmp_path):
    folder = write_tokenizer(tmp_path / "a")
    first = open_tokenizer(str(folder))
    assert open_tokenizer(str(folder)) is first
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert open_tokenizer(str(folder)).stops == (0, 1)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"a has no tokenizer.json"):
        open_tokenizer(str(folder))


def wide(facts):
    """More ids than uint16 has."""
    vocabulary = facts["model"]["vocab"]
    vocabulary |= {f"wide{i}": i for i in range(facts["added_tokens"][-1]["id"] + 1, 2**16 + 2)}


@pytest.mark.parametrize(("change", "dtype"), [(lambda facts: None, np.uint16), (wide, np.uint32)])
@pytest.mark.parametrize("workers", [1, 2])
def test_token_shards(tmp_path, change, dtype, workers):
    """The shards hold the documents' ids in the tokenizer's dtype, also when processes write them."""
    if workers == 2 and dtype == np.uint16:
        pytest.skip("the processes differ in nothing else")
    (tmp_path / "text").mkdir()
    texts = [f"{number} {TEXTS[1]}" for number in range(30)]
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number:02}.txt").write_text(text)
    name = str(write_tokenizer(tmp_path / "a", change=change))
    folders = str(tmp_path / "text"), str(tmp_path / "cache")
    config = DataConfig("text", "text", folders[0], None, "text", name, 0.1, "auto", folders[1])
    if workers == 2:
        from data import source_and_folder

        source, folder = source_and_folder(config, open_tokenizer(name))
        write_shards(folder, source, open_tokenizer(name), workers)
    dataset = open_dataset(config)
    tokenizer = dataset.tokenizer
    assert dataset.fingerprint["tokenizer"] == tokenizer.name
    assert {shard.tokens.dtype for shard in (*dataset.train, *dataset.val)} == {np.dtype(dtype)}
    documents = [[tokenizer.eot, *tokenizer.encode(text).tolist()] for text in texts]
    [held] = dataset.train
    in_train = [ids for ids in documents if str(ids)[1:-1] in str(held.tokens.tolist())]
    assert held.tokens.tolist() == [i for ids in in_train for i in ids]
    assert len(held) + sum(map(len, dataset.val)) == sum(map(len, documents))
    header = np.frombuffer(held.path.read_bytes()[:12], np.int32).tolist()
    assert header == [*((20240520, 1) if dtype == np.uint16 else (20240801, 7)), len(held)]  # llm.c's
    if dtype == np.uint32:
        with pytest.raises(DataError, match=r"magic 20240801 and version 7, not 20240520 and 1"):
            open_shards(held.path.parent.parent, "train", 257)


def of_type(kind):
    def change(facts):
        facts["model"]["type"] = kind

    return change


def set_key(**values):
    return lambda facts: facts.update(values)


PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_key(decoder={"type": "ByteFallback"}), "it is not byte-level, and only byte-level BPE is read"),
        (set_key(pre_tokenizer={"type": "Whitespace"}), "it is not byte-level"),
        (set_key(normalizer={"type": "Lowercase"}), r"it changes the text \(Lowercase\)"),
        (set_key(pre_tokenizer=PREFIXED), "it joins a line feed to the next line, or adds a space"),
        (set_key(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}), "its model is WordLevel"),
        (of_type("Other"), "tokenizer.json cannot be read: "),
        (set_key(model=None), "tokenizer.json cannot be read: "),
    ],
)
def test_another_kind_of_tokenizer_is_refused(tmp_path, change, message):
    with pytest.raises(DataError, match=message) as error:
        TokenizerJson(write_tokenizer(tmp_path / "a", change=change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "tokenizer.json names no end of text: correct eos_token in its tokenizer_config.json"),
        ({"eos_token": "<|none|>"}, "names an end of text that is none of its ids"),
        ({"eos_token": 10**6}, "names an end of text that is none of its ids"),
        ({"eos_token": [1]}, "names an end of text that is none of its ids"),
        ([], "tokenizer_config.json is not a JSON object"),
    ],
)
def test_a_wrong_end_of_text(tmp_path, settings, message):
    with pytest.raises(DataError, match=message):
        TokenizerJson(write_tokenizer(tmp_path / "a", settings=settings))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"model": {"type": "BPE"}}'])
def test_damaged_files(tmp_path, content):
    folder = write_tokenizer(tmp_path / "a")
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer.json cannot be read: ") as error:
        TokenizerJson(folder)
    assert "\n" not in str(error.value)


def test_names_of_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    for name, message in (
        (str(tmp_path / "empty"), r"empty has no tokenizer.json: name a folder that has one, or bytes or gpt2"),
        (
            str(tmp_path / "gone"),
            r"data.tokenizer=.*gone: there is no such folder; a run that trained with it has",
        ),
        ("words", r"data.tokenizer=words: choose bytes or gpt2, or name a folder with tokenizer.json or owner/name"),
    ):
        with pytest.raises(DataError, match=message):
            tokenizer_size(name, "data.tokenizer")
    assert tokenizer_size("gpt2", "tokenizer") == 50257  # without its files
