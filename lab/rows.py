"""Read and append the rows in results/<device>/<kind>.jsonl."""

import json
from pathlib import Path

from kernels.tuned import device_slug

RESULTS = Path(__file__).resolve().parents[1] / "results"


def read_rows(device: str, kind: str = "train") -> list[dict]:
    """Return the rows of a device, oldest first; empty if there is no file."""
    path = RESULTS / device / f"{kind}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_rows(path: Path, rows: list[dict]) -> Path:
    """Append rows to a .jsonl file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
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
