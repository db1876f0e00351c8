"""Show this machine, and test which kernels run on it and are right: `python -m scripts.doctor`.

"ok" means that the backend ran: forward and backward at a small shape, compared with reference() in float64 by the rule
of kernels/check.py, with NaN in new memory and the same bits in a second call. Every backend runs in another process,
so a backend that crashes or hangs is a line like any other.
`matrix=true` tests every dtype, width and feature, and prints the tables of results/README.md. `soak=10` tests the
device instead: for 10 minutes it repeats a training step, whose bits must stay the same. `speed=true` times each
backend beside eager at a model's shapes, and stores which ones are slower, so that runs say it (kernels/speeds.py).
"""

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.terminal import printable
from kernels.registry import ALL_OPS, check_name, impls
from kernels.speeds import table_paths
from kernels.tuned import read_table
from lab.bench import speed
from lab.bench.machine import describe_machine
from lab.bench.op import as_list
from lab.bench.probe import ERRORS, first_probe, first_word, matrix_probes, run_probes
from lab.bench.support import tables
from lab.commands import command
from lab.proof.soak import soak
from lab.rows import track_rows, write_rows
from model.config import PRECISIONS, GPTConfig
from model.vocabulary import take_vocabulary
from runtime.config import check
from runtime.device import environment, select_device
from runtime.folders import make_folder
from runtime.trackers import LoggerConfig, Tracker

COLUMNS = 100


@dataclass
class Config:
    op: Any
    impl: Any
    matrix: bool
    soak: float | None
    speed: bool
    rounds: int
    precision: str | None
    device: str
    limit: float
    keep: bool
    out_dir: str | None
    model: GPTConfig
    logger: LoggerConfig

    def __post_init__(self):
        self.op = as_list(self.op) or list(ALL_OPS)
        for op in self.op:
            check(op in ALL_OPS, f"op={op}: choose {', '.join(ALL_OPS)}")
        self.impl = as_list(self.impl)
        check(not self.impl or len(self.op) == 1, f"impl={','.join(self.impl)} needs one op: add op=NAME")
        for name in self.impl:
            if self.speed and name == "compile":  # eager under torch.compile
                continue
            check_name(self.op[0], name, key="impl")
        check(self.limit > 0, f"limit={self.limit:g}: it must be more than 0 seconds")
        check(self.soak is None or self.soak > 0, f"soak={self.soak}: it must be more than 0 minutes")
        modes = {"matrix=true": self.matrix, "soak": self.soak, "speed=true": self.speed}
        given = [name for name, value in modes.items() if value]
        check(len(given) < 2, f"{' and '.join(given)}: choose one of them")
        check(
            self.matrix or self.speed or not self.keep,
            "keep=true stores the rows of a matrix, or speeds: add matrix=true or speed=true",
        )
        check(self.rounds >= 1, f"rounds={self.rounds}: it must be at least 1")
        check(
            self.precision in (None, *PRECISIONS),
            f"precision={self.precision}: choose {', '.join(PRECISIONS)}, or null",
        )
        check(self.matrix or not self.out_dir, f"out_dir={self.out_dir} is for the rows of a matrix: add matrix=true")


def wrap(text: str, indent: int) -> str:
    return textwrap.fill(text, COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def examine_backends(
    ops: list[str], names: list[str], matrix: bool, device: torch.device, limit: float
) -> Iterator[dict]:
    """Yield {"op", "impl", "answers": {column: {value: status}}} for each backend, or only for those in `names`.

    `limit` is the time of one answer, in seconds.
    """
    make_probes = matrix_probes if matrix else first_probe
    columns = {(op, impl): make_probes(op, impl, device) for op in ops for impl in names or impls(op)}
    groups = [[probe for probes in by_column.values() for probe in probes.values()] for by_column in columns.values()]
    hide_bar = None if matrix else True  # None hides the bar unless stderr is a terminal
    results = tqdm(run_probes(groups, device, limit), total=len(groups), disable=hide_bar, leave=False)
    for ((op, impl), by_column), statuses in zip(columns.items(), results, strict=True):
        remaining = iter(statuses)
        answers = {column: {value: next(remaining) for value in probes} for column, probes in by_column.items()}
        yield {"op": op, "impl": impl, "answers": answers}


def answer_line(op: str, impl: str, column: str, status: str) -> str:
    """Return the line that shows the only answer of a backend; `column` is the dtype."""
    verdict, _, text = status.partition(": ")
    if verdict == "ok":
        text = f"{column}, {text}"
    return wrap(printable(f"{op:<10} {impl:<17} {verdict:<12} {text}"), indent=42)


def speed_table(device: torch.device, keep: bool) -> Path:
    """Return the table of speeds to write. Raises KernelError if it is broken, before the measurement."""
    check(device.type == "cuda" or not keep, "speed=true keep=true needs a GPU: the repo's tables are for GPUs")
    user_table, repo_table = table_paths(device)
    table = repo_table if keep else user_table
    read_table(table, "times")
    return table


def print_speeds(results: Iterator[tuple[list[str], list[dict]]]) -> list[dict]:
    """Print the lines of lab.bench.speed.time_model() as they come, and return its rows."""
    rows = []
    for lines, more in results:
        for line in lines:
            print(wrap(printable(line), indent=42), flush=True)
        rows += more
    return rows


def exit_with(errors: list[str]) -> None:
    """Print the errors, and exit with 1 if there are any."""
    if errors:
        print(printable("\n".join(errors)), file=sys.stderr)
        sys.exit(1)


# model.vocab_size=null is the size for the tokenizer bytes, because no key of this command names another
@command(Config, "doctor", complete=partial(take_vocabulary, key="tokenizer"))
def main(cfg: Config) -> None:
    device, tracker = select_device(cfg.device), Tracker(cfg.logger)
    env = environment(device)
    for line in describe_machine(device, env):
        print(wrap(line, indent=9))
    if cfg.soak:
        for line in soak(cfg.soak, device):
            print(line, flush=True)
        return
    if cfg.speed:
        table = speed_table(device, cfg.keep)
        precision = cfg.precision or ("amp" if device.type == "cuda" else "fp32")
        ops = [] if cfg.op == list(ALL_OPS) else cfg.op
        rows = print_speeds(speed.time_model(cfg.model, precision, ops, cfg.impl, cfg.rounds, device, cfg.limit, table))
        print(printable(f"\ndone     {table}"), flush=True)
        labels = [f"{row['step']}/{row['op']}/{row['impl']}" for row in rows]
        track_rows(tracker, "doctor-speed", cfg, dict(zip(labels, rows, strict=True)))
        wrong = [row for row in rows if first_word(row["status"]) in ERRORS]
        exit_with([f"error: {row['op']}={row['impl']} {row['status']}" for row in wrong])
        return
    folder = make_folder(cfg.out_dir, "doctor") if cfg.matrix else None
    if not cfg.matrix:
        print("\nop         backend           forward and backward, against reference() in float64", flush=True)
    rows, errors, counts = [], [], Counter()
    for row in examine_backends(cfg.op, cfg.impl, cfg.matrix, device, cfg.limit):
        rows.append({**row, "env": env})
        op, impl = row["op"], row["impl"]
        for column, statuses in row["answers"].items():
            for value, status in statuses.items():
                counts[first_word(status)] += 1
                if first_word(status) in ERRORS:
                    errors.append(f"error: {op}={impl} {column} {value} {status}")
                if not cfg.matrix:
                    print(answer_line(op, impl, column, status), flush=True)
    if cfg.matrix:
        print(printable(f"\n{tables(rows)}"))
        files = write_rows(rows, "support.jsonl", folder, cfg.keep)
        print(f"\nrows     {', '.join(map(str, files))}")
    total = f"{counts.total()} answers of {len(rows)} backends"
    print(f"\ndone     {total}: {', '.join(f'{count} {name}' for name, count in counts.items())}", flush=True)
    answers = {f"{row['op']}/{row['impl']}": row for row in rows}
    track_rows(tracker, "doctor", cfg, {"answers": dict(counts), **answers}, folder)
    exit_with(errors)


if __name__ == "__main__":
    main()
