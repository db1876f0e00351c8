"""Download a model from the Hugging Face hub, or find it in huggingface_hub's cache."""

import json
import re
from pathlib import Path

from common.files import read_text
from common.terminal import one_line
from data.errors import DataError
from data.hub import snapshot
from runtime.config import UserError, check, value_text

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FILES = (CONFIG, WEIGHTS, "model-*.safetensors", INDEX)
SHARD = re.compile(r"[\w.-]+\.safetensors")  # a file beside its index
MOST_JSON_BYTES = 2**26  # an index has 0.1 KB for each tensor


def hub_folder(name: str, weights: bool) -> Path:
    """Return the folder of a hub model in the cache. It holds config.json and, if `weights` is true, the weights.

    Raises UserError if the files cannot be downloaded; data/hub.py says when it uses the network.
    """

    def is_complete(folder: Path) -> bool:
        files = weight_files(folder) if weights else [folder / CONFIG]
        return bool(files) and all(file.exists() for file in files)

    try:
        patterns = FILES if weights else (CONFIG,)
        return snapshot(name, patterns, is_complete, f"a folder with {CONFIG} and {WEIGHTS}")
    except DataError as error:
        raise UserError(str(error)) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face folder: one file, the files that an index names, or none.

    Raises UserError if the index cannot be read, or names something else than a file beside it.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        return []
    file_by_tensor = read_json(index).get("weight_map")
    check(isinstance(file_by_tensor, dict), f"{index} has no weight_map, which names the file of each tensor")
    for name in file_by_tensor.values():
        is_beside = isinstance(name, str) and SHARD.fullmatch(name) is not None
        check(is_beside, f"{index} names {value_text(name)}, which is no safetensors file beside it")
    return [folder / name for name in sorted(set(file_by_tensor.values()))]


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raises UserError if the file cannot be read."""
    try:
        value = json.loads(read_text(path, MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    check(isinstance(value, dict), f"{path} is not a JSON object")
    return value
