"""Copy the rows of finished runs into results/: `python -m scripts.collect out/RUN ...`.

It appends the row of a run of train.py to results/<device>/train.jsonl, of scripts.generate to generate.jsonl, and of
scripts.max_context to context.jsonl. A run on one H200 goes to results/h200, and a run on four to results/h200x4. A row
stays as the run wrote it, whatever its status. A row that the file already has is not appended again. It skips a folder
without a row for results/, such as an interrupted job's, and then exits with status 1.

Each row in results/ has a CRC-32. The name of a .jsonl file instead of a run adds it to the rows that have none, such
as those that a person wrote.

--curves also writes a run's losses to results/<device>/curves/<name>-seed<seed>.jsonl. --beside h200x4 puts the row of
a run on fewer GPUs into that folder, for comparison. --suffix rungs puts rows into results/<device>-rungs.
"""

import sys
from pathlib import Path

from common.terminal import outlive_output, printable
from kernels.tuned import device_slug
from lab import rows
from lab.old_rows import rename_gluon
from runtime.config import UserError, path_argument
from runtime.folders import file_name
from runtime.row import read_row
from runtime.signals import exit_quietly
from scripts import flag_parser

# A key that only one command's config has -> the file for the command's rows, without .jsonl
KINDS = {"train": "train", "probe": "context", "batch": "generate"}


def row_kind(row: dict) -> str | None:
    """Return the name of the file for this row, without .jsonl; None if results/ has no file for it."""
    return next((kind for key, kind in KINDS.items() if key in row["config"]), None)


def why_skipped(row: dict | None) -> str | None:
    """Return why results/ does not take this row of a run; None if it does."""
    if row is None:
        return "no row in its result.json"
    if "env" not in row:  # a job of a sweep that ended before it recorded its environment
        return row["status"]
    parts = row.get("config"), row["env"], row.get("world_size", 1)
    if [type(part) for part in parts] != [dict, dict, int] or not isinstance(row["env"].get("device"), str):
        return "its row has no config, env.device or world_size of the right type"
    return None if row_kind(row) else "results/ has no file for its row"


def collect(run: Path, row: dict, curves: bool, beside: str | None = None, suffix: str | None = None) -> Path:
    """Append the row of the folder `run` to its file in results/, unless the file has it already. Return the file.

    `curves` also copies the losses. `beside` is the name of a folder in results/ that replaces the run's own; `suffix`
    is added to the run's own.
    """
    gpus = row.get("world_size", 1)
    device = device_slug(row["env"]["device"]) + (f"x{gpus}" if gpus > 1 else "") + (f"-{suffix}" if suffix else "")
    folder = rows.RESULTS / file_name(beside or device)
    path = folder / f"{row_kind(row)}.jsonl"
    curve_path = rows.curve_file(folder, row) if curves else None  # raises before anything is written
    lines = rows.read_metrics(run, row) if curves else []
    known = rows.read_whole(path)
    if any(named not in known for named in rename_gluon(row)):
        rows.append_rows(path, [row])
    if curve_path:
        losses = [{key: line[key] for key in ("step", "train/loss", "val/loss") if key in line} for line in lines]
        rows.replace_rows(curve_path, losses)
    return path


@exit_quietly()
def main() -> None:
    parser = flag_parser("collect", __doc__)
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="out/RUN", help="the folder of a finished run")
    parser.add_argument("--curves", action="store_true", help="also copy the losses")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--beside", metavar="DEVICE", help="a folder in results/ instead of the run's own")
    place.add_argument("--suffix", metavar="NAME", help="the folder results/<device>-NAME")
    arguments = parser.parse_args()
    outlive_output()
    skipped = 0
    for run in arguments.runs:
        try:
            if run.suffix == ".jsonl":
                rows.add_checksums(run)
                print(printable(f"{run}: each row has its CRC-32"))
                continue
            row = read_row(run)
            if reason := why_skipped(row):
                skipped += 1
                print(printable(f"{run}: skipped, {reason}"))
                continue
            path = collect(run, row, arguments.curves, arguments.beside, arguments.suffix)
            print(printable(f"{run} -> {path}"))
        except UserError as error:
            sys.exit(f"error: {printable(error)}")
    if skipped == len(arguments.runs):
        commands = "train.py, scripts.generate or scripts.max_context"
        sys.exit(f"error: no row to collect; pass the folders of finished runs of {commands}")
    if skipped:
        sys.exit(1)


if __name__ == "__main__":
    main()
