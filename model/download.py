"""Download a model from the Hugging Face hub, or find it in huggingface_hub's cache."""

import json
import re
from pathlib import Path

from common.files import read_text
from common.terminal import one_line
from data.errors import hub_error
from data.hub import why_hub_is_unreachable
from runtime.config import UserError, check, value_text

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FILES = (CONFIG, WEIGHTS, "model-*.safetensors", INDEX)
SHARD = re.compile(r"[\w.-]+\.safetensors")  # a file beside its index
MOST_JSON_BYTES = 2**26  # an index has 0.1 KB for each tensor


def hub_folder(name: str, weights: bool) -> Path:
    """Return the folder of a hub model in the cache. It holds config.json and, if `weights` is true, the weights.

    If the files are in the cache, nothing is sent to the hub. huggingface_hub obeys HF_HOME, HF_ENDPOINT and
    HF_HUB_OFFLINE. Raises UserError if the files cannot be downloaded.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    patterns = FILES if weights else (CONFIG,)
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        files = weight_files(folder) if weights else [folder / CONFIG]
        if files and all(file.exists() for file in files):
            return folder
    except errors.LocalEntryNotFoundError:
        pass  # not in the cache
    except errors.HFValidationError as error:
        raise UserError(
            f"{name}: there is no such file or folder, and it cannot be a name on the hub: {error}"
        ) from error
    missing = f"{name}: there is no such file or folder, it is not in the hub's cache, and"
    if reason := why_hub_is_unreachable():
        raise UserError(
            f"{missing} {reason}: fetch it once with a network, or name a folder with {CONFIG} and {WEIGHTS}"
        )
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except errors.RepositoryNotFoundError as error:
        status = error.response.status_code
        raise UserError(f"{missing} {constants.ENDPOINT} answers {status}: check the name") from error
    except (OSError, errors.HTTPError) as error:
        raise UserError(f"{name} could not be downloaded from {constants.ENDPOINT}: {hub_error(error)}") from error


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
