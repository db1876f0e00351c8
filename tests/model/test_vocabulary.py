"""model.vocab_size=null is the tokenizer's number of ids, padded to a multiple of 64, wherever a config has a model."""

import json
from dataclasses import asdict, replace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lab.commands import CONFIGS
from lab.generation.recipe import take_random_model
from model.pretrained import take_model_config
from model.sources import random_source
from model.vocabulary import guess_tokenizer, padded
from runtime.config import UserError
from scripts import max_context
from tests.data.test_tokenizer_json import write_tokenizer
from tests.model.test_today import LLAMA

SIZES = {"bytes": 320, "gpt2": 50304}


def composed(name, *overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(name, list(overrides), return_hydra_config=False)


@pytest.mark.parametrize(("tokenizer", "size"), SIZES.items())
def test_the_vocabulary_follows_the_tokenizer_when_the_config_names_no_size(tokenizer, size):
    cfg = composed("config", "model=tiny", f"data.tokenizer={tokenizer}")
    assert cfg.model.vocab_size is None
    take_model_config(cfg)
    assert cfg.model.vocab_size == size
    assert guess_tokenizer(size) == tokenizer
    cfg = composed("generate", "checkpoint=random", "model=tiny", f"tokenizer={tokenizer}")
    take_random_model(cfg)
    assert cfg.model.vocab_size == size


def test_the_vocabulary_is_of_bytes_when_no_tokenizer_is_named():
    cfg = composed("generate", "checkpoint=random", "model=tiny")
    take_random_model(cfg)
    assert cfg.model.vocab_size == SIZES["bytes"]
    cfg = composed("max_context", "model=tiny")
    max_context.main.new_task().complete(cfg)
    assert cfg.model.vocab_size == SIZES["bytes"]


def test_a_named_size_stays():
    for size in (400, 200):  # GPTConfig.check_vocabulary() refuses 200 later
        cfg = composed("config", "model=tiny", f"model.vocab_size={size}")
        take_model_config(cfg)
        assert cfg.model.vocab_size == size


def test_the_vocabulary_is_the_sources_with_init_from(monkeypatch, tmp_path):
    """GPT-2's weights have 50,257 rows. model=tiny and vocab_size=null ask for no other number."""
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 128, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    overrides = [f"init_from={tmp_path}", "model=tiny", "data.tokenizer=gpt2"]
    cfg = composed("config", *overrides)
    monkeypatch.setattr("model.pretrained.command_line_values", lambda *_: OmegaConf.load(CONFIGS / "model/tiny.yaml"))
    take_model_config(cfg)
    assert cfg.model.vocab_size == 50257


def test_a_model_on_the_hub_without_a_tokenizer_has_that_of_its_size(monkeypatch, tmp_path):
    """Our export of a Llama has no tokenizer.json. If the hub's model has one, no other tokenizer is taken."""
    llama = random_source(asdict(replace(LLAMA, vocab_size=320)))
    source = llama._replace(tokenizer="owner/name", name="owner/name")
    monkeypatch.setattr("model.pretrained.read_shape", lambda name: source)
    monkeypatch.setattr("data.tokenizer_json.snapshot", lambda *_: tmp_path)
    cfg = composed("config", "init_from=owner/name", "data.tokenizer=bytes")
    monkeypatch.setattr("model.pretrained.command_line_values", lambda *_: {})
    take_model_config(cfg)
    assert cfg.model.vocab_size == 320
    refused = r"^init_from=owner/name has the vocabulary of the tokenizer owner/name, and data.tokenizer is "
    with pytest.raises(UserError, match=refused + "gpt2"):
        take_model_config(composed("config", "init_from=owner/name", "data.tokenizer=gpt2"))
    write_tokenizer(tmp_path)
    with pytest.raises(UserError, match=refused + "bytes"):
        take_model_config(cfg)


def test_an_unknown_tokenizer_is_refused():
    with pytest.raises(
        UserError, match=r"^data.tokenizer=words: choose bytes or gpt2, or name a folder with tokenizer.json"
    ):
        take_model_config(composed("config", "model=tiny", "data.tokenizer=words"))


def test_padded_sizes():
    assert [padded(ids) for ids in (1, 64, 65, 257, 50257)] == [64, 64, 128, 320, 50304]


def test_a_run_records_the_size(hotswap, tmp_path):
    code, _, err = hotswap("+experiment=smoke", "train.max_steps=1", "train.eval_every=0", "out_dir=run")
    assert (code, err) == (0, "")
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").model.vocab_size == SIZES["bytes"]
