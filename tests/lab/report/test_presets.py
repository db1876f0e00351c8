"""The page calls a model by its preset, whatever its position table is."""

import pytest

from lab.commands import CONFIGS
from lab.report.presets import model_title, preset_of, preset_of_size
from model.config import GPTConfig
from model.cost import parameters
from tests.lab.report.sample_rows import make_generation_row, make_row
from tests.test_train import config

PRESETS = sorted(file.stem for file in (CONFIGS / "model").glob("*.yaml"))


def composed(preset, *words):
    """The fields of the preset, as train.py reads them."""
    return vars(config(f"model={preset}", "train.block_size=128", *words).model)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_with_any_table_keeps_its_name(preset):
    for words in ([], ["model.block_size=16384"], ["model.vocab_size=50257"]):
        row = make_row()
        row["config"]["model"] = composed(preset, *words)
        assert preset_of(row) == model_title(row) == preset
        generation = make_generation_row()
        generation["config"]["model"] = composed(preset, *words)
        assert preset_of(generation) == preset


def test_a_changed_preset_is_named_with_the_change():
    row = make_row(pos="rope")
    assert (preset_of(row), model_title(row)) == ("gpt2_124m", "gpt2_124m, pos=rope")
    row["config"]["model"] = composed("modern_124m", "model.qk_norm=false")
    assert (preset_of(row), model_title(row)) == ("modern_124m", "modern_124m, qk_norm=false")
    other = make_row(n_layer=13, parameters=131_563_776)
    assert preset_of(other) == "132M"


def test_a_generation_from_a_checkpoint_has_the_preset_of_its_parameters():
    """Such a row has no shape. GPT-2 124M and modern_124m round to the same size."""
    row = make_generation_row()
    row["config"]["model"] = None
    for preset in ("gpt2_124m", "modern_124m"):
        assert preset_of(row | {"parameters": parameters(GPTConfig(**composed(preset)))}) == preset
    assert preset_of(row) == "gpt2_124m"  # an old row has its size only in its name: generate-124M-...
    assert preset_of({"status": "failed: it has no config"}) == ""


def test_a_size_in_an_old_text_has_its_preset():
    """355M is GPT-2 350M's real size. A size that no preset has stays."""
    sizes = {"124M": "gpt2_124m", "355M": "gpt2_350m", "350M": "gpt2_350m", "7M": "7M", "": ""}
    assert {size: preset_of_size(size) for size in sizes} == sizes
