"""Read and append rows in .jsonl files, as in results/<device>/, and send rows to a tracker.

Each line that is written has a CRC-32. A line in results/ without one is an error, because a change of it would go
unnoticed. Files elsewhere may be of older versions, which wrote none. Rows of older versions are read with the names
of today (old_rows.py).
"""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from common.files import ENDS_WITH_CRC32, add_crc32, open_regular, read_bytes, read_line, write_atomically
from common.terminal import shell_command
from kernels.tuned import device_slug
from lab.old_rows import rename_gluon
from runtime.command import command_line
from runtime.config import UserError, check
from runtime.folders import file_name, make_folder
from runtime.row import read_row
from runtime.trackers import Tracker

RESULTS = Path(__file__).resolve().parents[1] / "results"


def read_rows(device: str, kind: str = "train") -> list[dict]:
    """Return the rows of a device, oldest first; empty if there is no file. Raises UserError as read_whole() does."""
    return read_whole(RESULTS / device / f"{kind}.jsonl")


def read_whole(path: Path) -> list[dict]:
    """Return the object in each line of a .jsonl file; empty without a file.

    Raises UserError if a line is damaged, or as read_jsonl() does.
    """
    good, bad = read_jsonl(path)
    for number, reason in bad.items():
        advice = f"; restore the file: {shell_command('git', 'checkout', path)}" if is_result(path) else ""
        raise UserError(f"{path}: line {number} is damaged ({reason}){advice}")
    return [row for _, row in good]


def read_jsonl(path: Path) -> tuple[list[tuple[int, dict]], dict[int, str]]:
    """Return ([(number, object)] of each line of a .jsonl file, {number of a damaged line: why}); empty without a file.

    Raises UserError if the file cannot be read, or if it is in results/ and a line has no CRC-32.
    """
    good, bad, must_have_crc32 = [], {}, is_result(path)
    for number, line in enumerate(read_lines(path), 1):
        try:
            good += [(number, row) for row in rename_gluon(read_line(line))]
        except (ValueError, RecursionError) as error:
            bad[number] = str(error)
            continue
        if must_have_crc32 and not ENDS_WITH_CRC32.search(line):
            add = shell_command("python", "-m", "scripts.collect", path)
            raise UserError(f"{path}: line {number} has no CRC-32; if the line is right, add it: {add}")
    return good, bad


def read_run(folder: Path) -> dict | None:
    """Return the row in a run's folder as read_row() does, with the names of today; None if it has none."""
    row = read_row(folder)
    return rename_gluon(row)[0] if row else None


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file; none if there is no file. Raises UserError if it cannot be read."""
    try:
        return read_bytes(path).splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def is_result(path: Path) -> bool:
    """Return whether the file is in results/."""
    return path.resolve().is_relative_to(RESULTS.resolve())


def add_checksums(path: Path) -> None:
    """Add the CRC-32 to each line of a .jsonl file that has none, such as a row that a person wrote.

    Raises UserError if a line is damaged, or if the file cannot be read or written.
    """
    lines = read_lines(path)
    if not lines:
        raise UserError(f"{path} has no rows, or does not exist")
    for number, line in enumerate(lines, 1):
        try:
            read_line(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {number} is damaged ({error}), and no line gets a CRC-32") from None
        if not ENDS_WITH_CRC32.search(line):
            lines[number - 1] = add_crc32(line.decode()).encode()
    try:
        write_atomically(path, b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def read_metrics(run: Path, row: dict) -> list[dict]:
    """Return the lines of a run's metrics.jsonl.

    Raises UserError if one is damaged, or if the row says that there were more.
    """
    lines = read_whole(run / "metrics.jsonl")
    lost = row.get("metrics_lines", 0) - len(lines)  # older rows have no metrics_lines
    check(lost <= 0, f"{run / 'metrics.jsonl'} has lost {lost} of {lost + len(lines)} lines: restore the file")
    return lines


def replace_rows(path: Path, rows: list[dict]) -> None:
    """Write a .jsonl file with these rows. Raises UserError, and the old file stays, if the disk is full."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encode(rows))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def encode(rows: list[dict]) -> bytes:
    """Return the lines of a .jsonl file, each with its CRC-32."""
    return "".join(add_crc32(json.dumps(row)) + "\n" for row in rows).encode()


def append_rows(path: Path, rows: list[dict]) -> Path:
    """Append rows to a .jsonl file, each with its CRC-32, and return the file's path.

    Raises UserError, and adds nothing, if the disk is full.
    """
    lines = encode(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(path, "ab", buffering=0) as file:
            size = file.tell()
            if file.write(lines) < len(lines):
                file.truncate(size)  # the next row would continue the half line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return path


def keep_rows(rows: list[dict], name: str, suffix: str | None = None) -> Path:
    """Append rows to the file `name` in results/<device>/, or in results/<device>-<suffix>/."""
    folder = device_slug(rows[-1]["env"]["device"]) + (f"-{suffix}" if suffix else "")
    return append_rows(RESULTS / file_name(folder) / name, rows)


def write_rows(rows: list[dict], name: str, folder: Path, keep: bool, suffix: str | None = None) -> list[Path]:
    """Append rows to the file `name` in `folder`, and with `keep` in results/ too: keep_rows(). Return the paths."""
    files = [append_rows(folder / name, rows)]
    if keep:
        files.append(keep_rows(rows, name, suffix))
    return files


def curve_file(folder: Path, row: dict) -> Path:
    """Return the file for the losses of this row's run in a folder of results/. Each seed has its own.

    Raises UserError if the row's name cannot name a file.
    """
    return folder / "curves" / file_name(f"{file_name(row.get('name'))}-seed{row['config'].get('seed')}.jsonl")


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
