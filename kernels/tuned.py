"""Tables of the fastest launch parameters on each GPU. scripts/tune.py measures them; training only looks them up.

Tile sizes, numbers of warps and similar launch parameters change a kernel's speed but not its results, and the best
ones depend on the GPU. A kernel asks for its parameters with its name and a key. The key holds what affects the speed
but stays fixed in a run: widths and dtypes, never B or T. An entry of the user's table comes first, then an entry of
the repo's table. If the repo has no table of this GPU, the table of another GPU of the same architecture is used. A
kernel without an entry gets its default, a heuristic in the kernel's own file.

    ~/.cache/hotswap/tuned/h200.json    the user's table; `python -m scripts.tune` writes it
    kernels/tables/sm90/h200.json       the repo's table; the same command with keep=true writes it

Both are JSON: "KERNEL KEY" -> {"parameters": {...}, ...}. The other fields record how the parameters were measured. The
user's table also has the choices of `auto`, under the name of an op: see fastest.py. A table holds its own SHA-256, so
it cannot be edited by hand.
"""

import functools
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from common.files import add_sha256, read_json, write_atomically
from kernels.names import GENERATION_OPS, KernelError

TABLES = Path(__file__).parent / "tables"
# The field that each entry of a table has -> (what the table holds, the command that makes it)
CONTENTS = {"parameters": ("launch parameters", "scripts.tune"), "times": ("speeds", "scripts.doctor speed=true")}
# (changes, requests) of override_tables() inside its with block, otherwise None. It is a variable of the module and not
# of the thread, because autograd launches kernels from another thread
_override: tuple[dict, dict] | None = None


def launch_parameters(kernel: str, key: str, default: dict, device: torch.device) -> dict:
    """Return the launch parameters of `kernel`, with the same names as `default`. The caller may change the dict.

    Raises KernelError if the table's entry has other names, because the kernel changed after it was measured.
    """
    name = f"{kernel} {key}".replace("torch.", "")
    if _override:
        changes, requests = _override
        requests[kernel] = name, default
        return default | changes.get(kernel, {})
    parameters = merged_table(device).get(name, default)
    if parameters.keys() != default.keys():
        path = next(path for path in tables_in_use(device) if name in read_table(path))
        raise KernelError(
            f"{path} has the parameters {', '.join(parameters)} for {name}, but the kernel needs {', '.join(default)}: "
            "the kernel changed after the measurement; run python -m scripts.tune for its op again"
        )
    return dict(parameters)


@contextmanager
def override_tables(changes: dict[str, dict]) -> Iterator[dict[str, tuple[str, dict]]]:
    """Ignore the tables inside the with block: every kernel gets its default, updated with changes[kernel].

    Yields a dict that records each kernel's request: kernel -> (name of its entry in the table, default).
    """
    global _override
    requests = {}
    outer, _override = _override, (changes, requests)
    try:
        yield requests
    finally:
        _override = outer


@functools.lru_cache
def merged_table(device: torch.device) -> dict[str, dict]:
    """Return {name of an entry: its parameters} for both tables. An entry of the user's table wins."""
    user_entries, repo_entries = map(read_table, tables_in_use(device))
    return {name: entry["parameters"] for name, entry in (repo_entries | user_entries).items()}


def is_choice(entry: str) -> bool:
    """Return whether the entry of a table has choices of `auto`, and not a kernel's launch parameters."""
    return entry.split()[0] in GENERATION_OPS


def table_paths(device: torch.device) -> tuple[Path, Path]:
    """Return the paths of the user's and the repo's table for this GPU. The files may not exist.

    For a CPU (Triton's interpreter) the file name is cpu.json.
    """
    name = architecture = "cpu"
    if device.type == "cuda":
        name = device_slug(torch.cuda.get_device_name(device))
        architecture = "sm{}{}".format(*torch.cuda.get_device_capability(device))
    return user_cache() / "tuned" / f"{name}.json", TABLES / architecture / f"{name}.json"


def user_cache() -> Path:
    """Return the folder of this user for what is measured or compiled once on a machine. It may not exist.

    Raises KernelError if the user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hotswap"
    except RuntimeError:
        raise KernelError("this user has no home folder for measured choices: set HOME or XDG_CACHE_HOME") from None


def tables_in_use(device: torch.device) -> tuple[Path, Path]:
    """Return table_paths(), with the table of another GPU of this architecture if the repo has none of this GPU."""
    user_table, repo_table = table_paths(device)
    same_architecture = sorted(repo_table.parent.glob("*.json"))
    return user_table, same_architecture[0] if same_architecture and not repo_table.exists() else repo_table


def read_table(path: Path, field: str = "parameters") -> dict[str, dict]:
    """Return the entries of a table, each with this field, or {} if there is no file.

    Raises KernelError if the table cannot be read or used.
    """
    try:
        entries = read_json(path)
        if all(isinstance(entry[field], dict) for entry in entries.values()):
            return entries
        why = f'"{field}" must map names to values'
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:  # it may be intact, so the message does not say to delete it
        raise KernelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    holds, command = CONTENTS[field]
    raise KernelError(f"{path} is not a table of {holds} ({why}); delete it, and run python -m {command}")


def write_table(path: Path, entries: dict[str, dict], field: str = "parameters") -> None:
    """Add entries to a table or replace them, one line an entry. Another process never reads a half-written file.

    Raises KernelError if the file cannot be written.
    """
    lines = (
        f"{json.dumps(name)}: {json.dumps(entry)}"
        for name, entry in sorted((read_table(path, field) | entries).items())
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, add_sha256("{\n" + ",\n".join(lines) + "\n}"))
    except OSError as error:
        raise KernelError(f"{path} cannot be written: {error.strerror}; set XDG_CACHE_HOME to another folder") from None
    merged_table.cache_clear()


def device_slug(device: str) -> str:
    """Turn a device's name into a file name: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia").strip()).strip("-")
