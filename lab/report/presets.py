"""The preset of a row's model: the file in configs/model/ with its shape, whatever its position table is.

A longer table has more parameters, so GPT-2's preset gpt2_124m counts 124M for 1,024 tokens and 136M for 16,384.
"""

import functools

from omegaconf import OmegaConf

from common.files import read_text
from lab.commands import CONFIGS
from lab.report.describe import model_size
from model.config import GPTConfig
from model.cost import parameters
from runtime.config import value_text

SHAPE = "n_layer", "n_head", "n_embd"
TABLES = "block_size", "vocab_size"  # the sizes of the tables, which follow the text


@functools.cache
def presets() -> dict[str, dict]:
    """Return name -> all fields of each preset, sorted by name."""
    files = sorted((CONFIGS / "model").glob("*.yaml"))
    return {file.stem: defaults() | OmegaConf.to_container(OmegaConf.create(read_text(file))) for file in files}


@functools.cache
def defaults() -> dict:
    """Return the fields of the group `model` that config.yaml sets."""
    return OmegaConf.to_container(OmegaConf.create(read_text(CONFIGS / "config.yaml")).model)


@functools.cache
def preset_sizes() -> dict[int, str]:
    """Return parameters -> the first preset with so many."""
    sized = [(name, fields) for name, fields in presets().items() if fields["vocab_size"]]
    return {parameters(GPTConfig(**fields)): name for name, fields in reversed(sized)}


def preset_of(row: dict) -> str:
    """Return the preset of a row's model, such as "gpt2_124m"; model_size() if no preset has its shape.

    Of presets with the same shape, the one with the fewest other differences counts. A generation from a checkpoint has
    no shape in its row; then the number of parameters decides. Empty if the run ended before it had a model.
    """
    model = row.get("config", {}).get("model")
    if model:
        found = [name for name, fields in presets().items() if all(model.get(key) == fields[key] for key in SHAPE)]
        return min(found, key=lambda name: len(differing_fields(model, name)), default=model_size(row))
    return preset_sizes().get(row.get("parameters")) or preset_of_size(model_size(row))


def preset_of_size(size: str) -> str:
    """Return the first preset of a size such as "124M", or with this ending (gpt2_350m: "350M"), or else the text."""
    near = [name for count, name in sorted(preset_sizes().items(), key=lambda item: item[1]) if size == millions(count)]
    named = [name for name in presets() if size and name.endswith(f"_{size.lower()}")]
    return next(iter([*near, *named]), size)


def millions(count: int) -> str:
    """Return a number of parameters as model_size() writes it."""
    return model_size({"parameters": count})


def differing_fields(model: dict, preset: str) -> dict:
    """Return {field: value} of a row's config.model where it differs from the preset, without TABLES.

    An old row lacks the newer fields: its model had the defaults. A row without any has no differences.
    """
    if not model:
        return {}
    fields, model = presets()[preset], defaults() | model
    return {key: value for key, value in model.items() if key not in TABLES and value != fields.get(key)}


def model_title(row: dict) -> str:
    """Return the preset and what differs from it: "gpt2_124m", "gpt2_124m, pos=rope"."""
    preset, model = preset_of(row), row.get("config", {}).get("model") or {}
    fields = differing_fields(model, preset) if preset in presets() else GPTConfig.changes(model)
    return ", ".join([preset, *(f"{key}={value_text(value).lower()}" for key, value in fields.items())])
