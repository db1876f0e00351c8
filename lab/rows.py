"""Read and append rows in .jsonl files, as in results/<device>/, and send rows to a tracker."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from files import read_line
from kernels.tuned import device_slug
from runtime.command import command_line
from runtime.config import UserError
from runtime.folders import make_folder
from runtime.trackers import Tracker

RESULTS = Path(__file__).resolve().parents[1] / "results"


def read_rows(device: str, kind: str = "train") -> list[dict]:
    """Return the rows of a device, oldest first; empty if there is no file. Raises UserError if a line is damaged."""
    path = RESULTS / device / f"{kind}.jsonl"
    good, bad = read_jsonl(path)
    if bad:
        raise UserError(f"{path}: line {bad[0]} is damaged; restore the file: git checkout {path}")
    return [row for _, row in good]


def read_jsonl(path: Path) -> tuple[list[tuple[int, dict]], list[int]]:
    """Return ([(number, object)] of each line of a .jsonl file, numbers of the damaged lines); empty without a file."""
    good, bad = [], []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            good.append((number, read_line(line)))
        except (ValueError, RecursionError):
            bad.append(number)
    return good, bad


def append_rows(path: Path, rows: list[dict]) -> Path:
    """Append rows to a .jsonl file, and return its path. Raises UserError, and adds nothing, if the disk is full."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(lines) < len(lines):
                file.truncate(size)  # the next row would continue the half line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return path


def keep_rows(rows: list[dict], name: str) -> Path:
    """Append rows to the file `name` in results/<device>/."""
    return append_rows(RESULTS / device_slug(rows[-1]["env"]["device"]) / name, rows)


def write_rows(rows: list[dict], name: str, folder: Path, keep: bool) -> list[Path]:
    """Append rows to the file `name` in `folder`, and with `keep` in results/<device>/ too. Return the paths."""
    files = [append_rows(folder / name, rows)]
    if keep:
        files.append(keep_rows(rows, name))
    return files


def curve_file(folder: Path, row: dict) -> Path:
    """Return the file for the losses of this row's run in a folder of results/. Each seed has its own."""
    return folder / "curves" / f"{row['name']}-seed{row['config']['seed']}.jsonl"


def track_rows(tracker: Tracker, name: str, cfg: object, rows: dict[str, dict], folder: Path | None = None) -> None:
    """Send the rows of a command that measures to its tracker, as one run. `rows` is {label: row}.

    A number of a row is the figure "LABEL/KEY". The table `rows` has the texts, too. The tracker writes into `folder`,
    by default a new folder in out/.
    """
    if tracker.config.name == "none":
        return
    folder = folder or make_folder(None, name)
    env = next((row["env"] for row in rows.values() if "env" in row), None)
    tracker.start(folder, {"name": name, "config": OmegaConf.to_container(OmegaConf.structured(cfg)), "env": env})
    values = [(label, key, value) for label, row in rows.items() for key, value in leaves(row)]
    tracker.log(1, {f"{label}/{key}": value for label, key, value in values if isinstance(value, int | float)})
    tracker.log_table("rows", ["row", "key", "value"], [[label, key, str(value)] for label, key, value in values])
    tracker.finish({"status": "ok", "command": command_line()})
    if line := tracker.view_line(folder):
        print(line)


def leaves(row: dict) -> Iterator[tuple[str, object]]:
    """Yield (key, value) of a row without env. A dict's keys follow its own: ("training/loss", 7.6)."""
    for key, value in row.items():
        if isinstance(value, dict) and key != "env":
            yield from ((f"{key}/{inner}", leaf) for inner, leaf in leaves(value))
        elif key != "env":
            yield key, value
