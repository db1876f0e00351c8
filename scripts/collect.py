"""Keep the rows of finished runs: `python -m scripts.collect out/RUN ...`

Appends each run's result row to results/<device>/train.jsonl (of four H200: results/h200x4), of scripts.generate to
generate.jsonl, of scripts.max_context to context.jsonl, and with --curves its training losses to
results/<device>/curves/<its name>.jsonl. Rows are kept as they were written, whatever their status. With --beside
h200x4 a run on fewer of a machine's GPUs goes there too, to be compared with.
"""

import argparse
import json
import sys
from pathlib import Path

from kernels.tuned import slug
from runtime.run import read_row

RESULTS = Path(__file__).parent.parent / "results"


def collect(run: Path, curves: bool, beside: str | None = None) -> Path:
    """The file that the row went to. `run` is a folder with result.json and metrics.jsonl."""
    row = read_row(run)
    devices = row.get("world_size", 1)
    folder = RESULTS / (beside or slug(row["env"]["device"]) + (f"x{devices}" if devices > 1 else ""))
    folder.mkdir(parents=True, exist_ok=True)
    kind = "train" if "train" in row["config"] else "context" if "probe" in row["config"] else "generate"
    line = json.dumps(row) + "\n"
    with (folder / f"{kind}.jsonl").open("a+") as file:
        file.seek(0)
        if line not in file:  # else it is kept already
            file.write(line)
    if curves:
        (folder / "curves").mkdir(exist_ok=True)
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        kept = [{key: line[key] for key in ("step", "train/loss", "val/loss") if key in line} for line in lines]
        (folder / "curves" / f"{row['name']}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    return folder / f"{kind}.jsonl"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="out/RUN")
    parser.add_argument("--curves", action="store_true", help="keep the losses too")
    parser.add_argument("--beside", metavar="DEVICE", help="the folder in results/, where it is not the run's own")
    arguments = parser.parse_args()
    if missing := [str(run) for run in arguments.runs if not read_row(run)]:
        sys.exit(f"error: no row in the result.json of {', '.join(missing)}; name the folders of finished runs")
    for run in arguments.runs:
        row = read_row(run)
        if "env" not in row:  # a job of a sweep that ended before it began
            print(f"{run}: left out, {row['status']}")
            continue
        print(f"{run} -> {collect(run, arguments.curves, arguments.beside)}")
