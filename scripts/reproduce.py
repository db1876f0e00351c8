"""Run a stored row again on this machine: `python -m scripts.reproduce results/h200/train.jsonl 20`.

ROWS is a file of rows in results/, or the folder of a run. ROW names one row of a file: its line, or a part of its
command, name or commit that no other row has. The row's command runs again in a new folder. A row may be from somebody
else: a command that is not of this repo, or that names code outside of kernels/, is refused. Then a line each gives
the ratio of the speeds with its 95% interval, how far the last training losses differ, and what differs in the
environment, in the kernels that ran and in the config.

The exit code is 0 if the speeds are a tie, which means that the interval contains 1. It is 2 if the new run is faster
or slower, and 1 after an error.
"""

import subprocess
import sys
from pathlib import Path

from common.terminal import class_and_message, override, printable, shell_command
from lab.rerun import rerun_words
from lab.rows import read_run, read_whole
from lab.sweep.compare import Ratio, differing_values, ratio, settings, step_seconds
from lab.sweep.table import speed
from runtime.config import UserError, check, path_argument, value_text
from runtime.folders import file_name, make_folder
from runtime.row import read_row
from runtime.signals import exit_quietly
from scripts import flag_parser

ROOT = Path(__file__).resolve().parent.parent
OTHER_SPEED = 2  # the exit code if the new run is faster or slower
OWN_ENVIRONMENT = {"gpu", "git_commit_missing"}  # no other machine has the same GPU; git_commit itself is compared


def read_source(path: Path) -> list[dict]:
    """Return the rows of a file, or the only row of a run's folder. Raises UserError if there are none."""
    if path.is_dir():
        row = read_run(path)
        check(row is not None, f"{path} has no row: it is not the folder of a run with a result.json")
        return [row]
    check(path.exists(), f"{path} does not exist; pass a file of results/ or the folder of a run")
    rows = read_whole(path)
    check(bool(rows), f"{path} is empty")
    return rows


def choose_row(rows: list[dict], name: str | None, path: Path) -> tuple[int, dict]:
    """Return (the line, the row) that `name` names: a line, or a part of the command, the name or the commit.

    Raises UserError if no row or several rows have this name.
    """
    how = f"name one by its line (1 to {len(rows)}), or by a part of its command, name or commit"
    if name is None:
        check(len(rows) == 1, f"{path} has {len(rows)} rows: {how}")
        return 1, rows[0]
    if name.isdecimal() and 1 <= int(name) <= len(rows):
        return int(name), rows[int(name) - 1]

    def texts(row: dict) -> list[str]:
        env = row.get("env") if isinstance(row.get("env"), dict) else {}
        return list(map(str, filter(None, (row.get("command"), row.get("name"), env.get("git_commit")))))

    found = [line for line, row in enumerate(rows, 1) if any(name in text for text in texts(row))]
    check(bool(found), f"{path} has no row {name}: {how}")
    lines = ", ".join(map(str, found[:10])) + (", ..." if len(found) > 10 else "")
    check(len(found) == 1, f"{len(found)} rows of {path} match {name}: pass one of the lines {lines}")
    return found[0], rows[found[0] - 1]


def reproduction_command(row: dict, folder: Path) -> list[str]:
    """Return the words of the row's command, with this Python and a folder of its own.

    Raises UserError if it is not the command of a training or a generation, or as rerun_words() does.
    """
    launcher, *words = rerun_words(row)
    flags = []
    if launcher == "torchrun":  # --standalone --nproc_per_node=N
        flags, words = ["-m", "torch.distributed.run", *words[:2]], words[2:]
    if words[0] == "train.py":
        words[0] = str(ROOT / "train.py")
    else:
        check(words[1] == "scripts.generate", f"its command is neither of train.py nor of scripts.generate: {words[1]}")
    return [sys.executable, *flags, *words, override("out_dir", folder)]


def check_row(row: dict) -> None:
    """Raise UserError if the row cannot be compared: it is compared with itself, before an hour of training."""
    check("command" in row and "config" in row, "this row has no command; runs and generations have one")
    check(row.get("status") == "ok", f"this row has no speed (its status: {value_text(row.get('status'))})")
    try:
        check(len(step_seconds(row)) > 1, "it has fewer than 2 timed intervals, which give no spread")
        comparison_lines(row, row, ratio([row], [row]))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"a value of this row is missing or wrong ({class_and_message(error)[:200]})") from None


def comparison_lines(row: dict, original: dict, speeds: Ratio) -> list[str]:
    """Return the lines that compare a new row with the original: speed, loss, and what differs."""
    ran = f"speed    {speed(row):,.0f} tok/s, the row has {speed(original):,.0f}"
    lines = [f"{ran}: {speeds.verdict}, {speeds.value:.3f}x ({speeds.interval})"]
    if loss := loss_line(row, original):
        lines.append(loss)
    return lines + difference_lines(row, original)


def loss_line(row: dict, original: dict) -> str | None:
    """Return a line about the last training losses; None for a generation, which has none."""
    now, then = row.get("train/loss"), original.get("train/loss")
    if now is None or then is None:
        return None
    if now == then:
        return f"loss     {now:.6g}, equal to the row's"
    return f"loss     {now:.6g}, the row's is {then:.6g}: {abs(now - then) / then:.1e} of it apart"


def difference_lines(row: dict, original: dict) -> list[str]:
    """Return a line for each difference of the environments, of the kernels that ran, and of the configs."""
    parts = {
        "": (row["env"], original.get("env", {})),
        "kernels.": (row["kernels"], original.get("kernels", {})),
        "config.": (settings(row), settings(original)),
    }
    lines = []
    for prefix, (here, there) in parts.items():
        for key in (key for key in here | there if key not in OWN_ENVIRONMENT):
            for name, now, then in differing_values(key, here.get(key), there.get(key)):
                lines.append(f"differs  {prefix}{name}: {now} here, {then} in the row")
    return lines or ["same     device, versions, commit, kernels and config"]


def reproduce(path: Path, name: str | None, out_dir: Path | None) -> Ratio:
    """Run the row again and print the comparison. Return the ratio of the new speed to the row's."""
    line, original = choose_row(read_source(path), name, path)
    where = f"{path}" if path.is_dir() else f"{path}, line {line}"
    try:
        check_row(original)
        reproduction_command(original, Path("out"))  # refuses before it makes a folder
        folder = make_folder(out_dir, f"reproduce-{file_name(original.get('name'))}")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    print(printable(f"row      {where}: {original['name']}, started {original.get('started')}"))
    print(printable(f"command  {shell_command(*rerun_words(original))}\n"), flush=True)
    code = subprocess.run(reproduction_command(original, folder), stdin=subprocess.DEVNULL).returncode
    row = read_row(folder)
    check(code == 0 and row is not None, f"{where}: its command failed here with exit code {code}; see its lines above")
    speeds = ratio([row], [original])
    check(speeds is not None, f"{where}: its command was too short here to measure a speed with a spread")
    print(printable("\n" + "\n".join(comparison_lines(row, original, speeds))))
    print(f"done     {folder / 'result.json'}")
    return speeds


@exit_quietly()
def main() -> None:
    parser = flag_parser("reproduce", __doc__)
    parser.add_argument("rows", type=path_argument, metavar="ROWS", help="a file of rows, or the folder of a run")
    parser.add_argument("row", nargs="?", metavar="ROW", help="a line, or a part of command, name or commit")
    parser.add_argument(
        "--out_dir", type=path_argument, metavar="FOLDER", help="the folder of the new run; default: a new one in out/"
    )
    arguments = parser.parse_args()
    try:
        speeds = reproduce(arguments.rows, arguments.row, arguments.out_dir)
    except UserError as error:
        sys.exit(f"error: {printable(error)}")
    sys.exit(0 if speeds.verdict == "tie" else OTHER_SPEED)


if __name__ == "__main__":
    main()
