"""Launch parameters that were measured on this GPU, for kernels to start with; nothing is tried while a model trains.

Tile sizes, warps and the like change a kernel's speed and not its answer, and which are best depends on the GPU. A
kernel asks for its own by its name and a key: what its speed hangs on and a run does not change, widths and dtypes, but
never B or T. It gets the user's entry, or the repo's, or its default: the heuristic that stands in the kernel's file.

    ~/.cache/hotswap/tuned/h200.json    the user's: `python -m scripts.tune op=norm` writes it
    kernels/tables/h200.json            the repo's: with keep=true

Both are JSON, "KERNEL KEY" -> {"parameters": {...}, and how they were measured}.
"""

import functools
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kernels.registry import KernelError

TABLES = Path(__file__).parent / "tables"
_trial: tuple[dict, dict] | None = None  # override()'s; of the whole process, as autograd launches from another thread


def tuned(kernel: str, key: str, default: dict, device: torch.device) -> dict:
    """The parameters to launch `kernel` with, a dict of the caller's own, with `default`'s names.

    KernelError: the table's entry has other names, as one that was measured before the kernel changed.
    """
    name = f"{kernel} {key}".replace("torch.", "")
    if _trial:
        changes, asked = _trial
        asked[kernel] = name, default
        return default | changes.get(kernel, {})
    found = table(device).get(name, default)
    if found.keys() != default.keys():
        path = next(path for path in files(device) if name in read(path))
        raise KernelError(
            f"{path} gives {name} the parameters {', '.join(found)}, and the kernel takes {', '.join(default)}: it has "
            "changed since; run python -m scripts.tune for its op again, or delete the entry"
        )
    return dict(found)


@contextmanager
def override(changes: dict[str, dict]) -> Iterator[dict[str, tuple[str, dict]]]:
    """Within it a kernel named in `changes` has its default with these changes, every other one its default, whatever
    the tables say. Yields what is asked for, as it is: kernel -> (name of the table's entry, default)."""
    global _trial
    before, _trial = _trial, (changes, {})
    try:
        yield _trial[1]
    finally:
        _trial = before


@functools.lru_cache
def table(device: torch.device) -> dict[str, dict]:
    """Name of the entry -> parameters, of the user's table and the repo's."""
    mine, ours = map(read, files(device))
    return {name: entry["parameters"] for name, entry in (ours | mine).items()}


def files(device: torch.device) -> tuple[Path, Path]:
    """Where the user's table of this GPU is, and the repo's, if they are. Of Triton's interpreter: cpu.json."""
    name = slug(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "hotswap" / "tuned" / f"{name}.json", TABLES / f"{name}.json"


def read(path: Path) -> dict[str, dict]:
    """The entries of a table; none, where there is no file. KernelError: it is none."""
    try:
        entries = json.loads(path.read_text()) if path.exists() else {}
        if all(isinstance(entry["parameters"], dict) for entry in entries.values()):
            return entries
        why = "parameters are name -> value"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise KernelError(f"{path} is no table of launch parameters ({why}); delete it, and run python -m scripts.tune")


def write(path: Path, entries: dict[str, dict]) -> None:
    """Add entries to a table, a line each, or replace them; the file is whole at any time. KernelError: the disk."""
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted((read(path) | entries).items()))
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        unfinished.replace(path)
    except OSError as error:
        raise KernelError(f"{path} cannot be written: {error.strerror}; XDG_CACHE_HOME moves it") from None
    table.cache_clear()


def slug(device: str) -> str:
    """ "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia").strip()).strip("-")
