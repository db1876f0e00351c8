"""The row of a run: its file result.json, and the lock that says whether the run is alive."""

import contextlib
import fcntl
import json
import math
import os
import time
from pathlib import Path
from typing import TextIO

from common.files import add_crc32, last_line, open_regular, read_bytes, read_line, write_atomically
from common.terminal import printable
from runtime.config import UserError, check
from runtime.folders import explain_unwritable, make_folder
from runtime.signals import find_interrupt

UNFINISHED = "stopped: it was killed, or is still running"  # the status on the disk until the run ends
KILLED = "stopped: killed"  # read_row() returns this instead of UNFINISHED if no process locks the folder


def lock_folder(folder: Path) -> TextIO:
    """Make the folder and lock it, until this process ends or closes the returned file.

    The file holds the number of its inode: see is_copy(). Raises UserError if another process holds the lock.
    """
    make_folder(str(folder), folder.name)
    with explain_unwritable(folder), contextlib.ExitStack() as stack:
        file = stack.enter_context(open_regular(folder / ".lock", "a"))
        for _ in range(3):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                print(os.fstat(file.fileno()).st_ino, file=file, flush=True)
                stack.pop_all()  # the file stays open, and so the lock is held
                return file
            except BlockingIOError:
                time.sleep(0.05)  # is_in_use() of another process holds the lock for a moment
    raise UserError(f"out_dir={folder} is in use by a running process; choose another folder")


def is_in_use(folder: Path) -> bool:
    """Return whether a process holds the lock of the run's folder. Also True if .lock is missing or cannot be read."""
    try:
        with open_regular(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def is_copy(folder: Path) -> bool:
    """Return whether the folder is a copy of a run's folder: .lock has the number of another inode."""
    lock = folder / ".lock"
    with contextlib.suppress(OSError, ValueError):
        return int(read_bytes(lock, at_most=100)) != lock.stat().st_ino
    return False


def write_row(folder: Path, row: dict) -> None:
    """Write the row as result.json. A kill leaves either the old row or the new row, complete."""
    text = json.dumps(without_nonfinite(row), indent=1)
    write_atomically(folder / "result.json", f"{add_crc32(text)}\n".encode())


def read_row(folder: Path) -> dict | None:
    """Return the row in a run's folder, its status in one line; None if it is missing or cannot be read.

    The status of a killed run is KILLED, with its last step. In a copy of its folder, it says that it may be a copy.
    """
    try:
        row = read_line(read_bytes(folder / "result.json").rstrip(b"\n"))
        status = printable(" ".join(row["status"].split()))
        if status == UNFINISHED and not is_in_use(folder):
            step = last_line(folder / "metrics.jsonl").get("step")
            status = f"{KILLED} after step {step}" if step else KILLED
            if is_copy(folder):
                status += ", or copied while it ran"
        return row | {"status": status}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read_known_row(folder: Path, advice: str) -> dict | None:
    """Return the row in a run's folder; None if there is none. Raises UserError with `advice` if it cannot be read."""
    row, path = read_row(folder), folder / "result.json"
    check(row is not None or not os.path.lexists(path), f"{path} is damaged or cannot be read{advice}")
    return row


def without_nonfinite(value):
    """Return the value with None in place of NaN and infinity, at any depth of its dicts and lists."""
    if isinstance(value, dict):
        return {key: without_nonfinite(member) for key, member in value.items()}
    if isinstance(value, list):
        return [without_nonfinite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def status_of(error: BaseException | None) -> str:
    """Return the status of a run that ended with this error. With None it is `ok`."""
    if error is None:
        return "ok"
    error = find_interrupt(error) or error
    word = getattr(error, "status", "failed")
    return word if word == "oom" else f"{word}: {str(error) or type(error).__name__}"
