"""Find and store the fastest launch parameters of our Triton kernels on this GPU: `python -m scripts.tune op=norm`.

Afterwards, every launch of such a kernel uses the stored parameters. lab/bench/tune.py describes the search.
`python -m scripts.tune auto=true` finds and stores the fastest backend of each op instead, for kernels=auto and
attn=auto.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.registry import OPS, backend, contract, load
from kernels.tuned import is_choice, read_table, table_paths, write_table
from lab.bench.choose import fill_attention, fill_op
from lab.bench.op import OpConfig
from lab.bench.tune import UNFIT, fastest, table, tune_shape
from lab.commands import command
from lab.rows import track_rows
from runtime.config import check
from runtime.device import environment, explain_out_of_memory, select_device
from runtime.trackers import LoggerConfig, make_tracker
from terminal import outlive_output, printable


@dataclass
class Config:
    op: str | None
    auto: bool
    shape: Any
    dtype: str | None
    device: str
    rounds: int
    keep: bool
    logger: LoggerConfig

    def __post_init__(self):
        if self.dtype is None:
            self.dtype = "bfloat16" if select_device(self.device).type == "cuda" else "float32"
        check(self.op is None or self.op in OPS, f"op={self.op}: choose {', '.join(OPS)}")
        check(not self.shape or self.op is not None, f"shape={self.shape}: it needs op=NAME")
        check(not (self.auto and self.keep), "auto=true with keep=true: the choices are for your table only")
        if self.auto and self.op == "attention":
            check(
                not self.shape, "op=attention auto=true takes no shape: scripts.bench_attention auto=true has its keys"
            )
        _ = self.configs  # checks their fields

    @property
    def configs(self) -> list[OpConfig]:
        """The config of each op."""
        rest = self.dtype, self.device, self.rounds, self.keep
        ops = [self.op] if self.op else OPS
        # auto=true chooses for the shapes of GPT-2 on a CPU, too: store_choices() takes few of their rows there
        return [OpConfig(op, self.shape or (list(contract(op).SHAPES) if self.auto else None), *rest) for op in ops]


@command(Config, "tune", errors=UNFIT)
def main(cfg: Config) -> None:
    outlive_output()
    check(cfg.op is not None or cfg.auto, "op is missing: name one, as in op=norm, or pass auto=true for all ops")
    device, tracker = select_device(cfg.device), make_tracker(cfg.logger)
    gpu = device.type == "cuda"
    check(gpu or not cfg.keep, "keep=true needs a GPU: the repo's tables are for GPUs, not for Triton's interpreter")
    user_table, repo_table = table_paths(device)
    path, env = repo_table if cfg.keep else user_table, environment(device)
    read_table(path)  # raises KernelError for a broken table before the search, and not after it
    heading = f"{env['device']}, triton {env['triton']}, {cfg.dtype}, medians of {cfg.rounds} rounds"
    if cfg.auto:
        print(heading, flush=True)
        store_choices(cfg.configs, device)
        print(printable(f"\ndone     {path}"))
        choices = {entry: facts for entry, facts in read_table(path).items() if is_choice(entry)}
        track_rows(tracker, "tune-auto", cfg, choices)
        return
    load(cfg.op, "triton", device)  # raises Unavailable with the reason if it cannot run here
    check(hasattr(backend(cfg.op, "triton"), "candidates"), f"kernels/{cfg.op}/triton.py has no candidates() to try")
    print(heading)
    if not gpu:
        print("a trial: the times of Triton's interpreter say nothing about a GPU")
    measured = {"triton": env["triton"], "date": time.strftime("%Y-%m-%d")}
    entries = store_parameters(cfg.configs[0], path, measured, device)
    shapes = ", ".join(cfg.configs[0].shape)
    check(entries, f"op={cfg.op} {cfg.dtype}: nothing to tune here at {shapes}: choose another op, dtype or shape")
    best = [rows[-1] | fastest(rows) for rows in entries.values()]
    print(printable(f"\n{table(best)}\n\ndone     {path}"))
    track_rows(tracker, f"tune-{cfg.op}", cfg, {row["entry"]: row for row in best})


def store_choices(configs: list[OpConfig], device: torch.device) -> None:
    """Store the fastest backend of each op, and print it."""
    for config in configs:
        if config.op == "attention":
            lines = fill_attention(config.dtype, config.rounds, device)
        else:
            lines = fill_op(config.op, config.shape, config.dtype, config.rounds, device)
        for line in lines:
            print(line, flush=True)


def store_parameters(config: OpConfig, path: Path, measured: dict, device: torch.device) -> dict[str, list[dict]]:
    """Store the fastest launch parameters in the table at `path`, with `measured`: when, and with which Triton.

    Returns {name of an entry: one row for each shape}.
    """
    entries: dict[str, list[dict]] = {}
    try:
        for name in config.shape:
            with explain_out_of_memory(f"op={config.op} shape={name}", "the size: choose a smaller shape"):
                for row in tune_shape(config.op, name, config.dtype, config.rounds, device):
                    rows = entries.setdefault(row["entry"], [])
                    rows.append(row)
                    write_table(path, {row["entry"]: {**fastest(rows), "timed": row["timed"], **measured}})
    except KeyboardInterrupt:
        print(printable(f"interrupted: {path} has the results so far (kernels: {len(entries)})"), file=sys.stderr)
        sys.exit(130)
    return entries


if __name__ == "__main__":
    main()
