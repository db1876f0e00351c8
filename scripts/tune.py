"""Find and store the fastest launch parameters of our Triton kernels on this GPU: `python -m scripts.tune`.

It takes five minutes; with op=NAME it searches for one op, without a limit. Afterwards, every launch of such a kernel
uses the stored parameters. lab/bench/tune.py describes the search.
`python -m scripts.tune auto=true` finds and stores the fastest backend of each op instead, for kernels=auto, attn=auto
and kernels.decode=auto.
"""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.terminal import outlive_output, printable
from kernels.names import GENERATION_OPS
from kernels.registry import OPS, Unavailable, backend, contract, impls, load
from kernels.tuned import is_choice, read_table, table_paths, write_table
from lab.bench.choose import fill_attention, fill_decode, fill_op
from lab.bench.op import OpConfig
from lab.bench.tune import UNFIT, Budget, choose_parameters, gains, search_order, table, tune_shape
from lab.commands import command
from lab.rows import track_rows
from runtime.config import check
from runtime.device import OutOfMemory, environment, explain_out_of_memory, select_device
from runtime.trackers import LoggerConfig, Tracker

MINUTES = 5.0


@dataclass
class Config:
    op: str | None
    auto: bool
    shape: Any
    dtype: str | None
    device: str
    rounds: int
    minutes: float | None
    keep: bool
    logger: LoggerConfig

    def __post_init__(self):
        if self.dtype is None:
            self.dtype = "bfloat16" if select_device(self.device).type == "cuda" else "float32"
        check(self.minutes is None or self.minutes > 0, f"minutes={self.minutes}: it must be more than 0")
        check(self.op is None or self.op in self.possible, f"op={self.op}: choose {', '.join(self.possible)}")
        check(not self.shape or self.op is not None, f"shape={self.shape}: it needs op=NAME")
        check(not (self.auto and self.keep), "auto=true with keep=true: the choices are for your table only")
        if self.auto and self.op == "attention":
            check(
                not self.shape, "op=attention auto=true takes no shape: scripts.bench_attention auto=true has its keys"
            )
        _ = self.configs  # checks their fields

    @property
    def limit(self) -> float:
        """The minutes of the search, or infinity."""
        return self.minutes or (math.inf if self.op else MINUTES)

    @property
    def possible(self) -> list[str]:
        return GENERATION_OPS if self.auto else OPS

    @property
    def configs(self) -> list[OpConfig]:
        """The config of each op."""
        rest = self.dtype, self.device, self.rounds, self.keep
        ops = [self.op] if self.op else [op for op in self.possible if self.auto or is_tunable(op)]
        return [OpConfig(op, self.shape or self.default_shapes(op), *rest) for op in ops]

    def default_shapes(self, op: str) -> list[str] | None:
        """Return the shapes for which auto=true chooses; None without it, for OpConfig's own."""
        if not self.auto:
            return None
        if op == "decode":  # of 124M alone, because each shape takes a minute; on a CPU of a tiny model
            gpu = select_device(self.device).type == "cuda"
            return list(contract(op).SHAPES if gpu else contract(op).CASES)[:1]
        return list(contract(op).SHAPES)  # GPT-2's on a CPU, too: fill_op() takes few of their rows there


@command(Config, "tune", errors=UNFIT)
def main(cfg: Config) -> None:
    outlive_output()
    device, tracker = select_device(cfg.device), Tracker(cfg.logger)
    gpu = device.type == "cuda"
    check(gpu or not cfg.keep, "keep=true needs a GPU: the repo's tables are for GPUs, not for Triton's interpreter")
    user_table, repo_table = table_paths(device)
    path, env = repo_table if cfg.keep else user_table, environment(device)
    read_table(path)  # raises KernelError for a broken table before the search, and not after it
    heading = f"{env['device']}, triton {env['triton']}, {cfg.dtype}, medians of {cfg.rounds} rounds"
    print(heading, flush=True)
    if cfg.auto:
        store_choices(cfg.configs, device)
        print(printable(f"\ndone     {path}"))
        choices = {entry: facts for entry, facts in read_table(path).items() if is_choice(entry)}
        track_rows(tracker, "tune-auto", cfg, choices)
        return
    if not gpu:
        print("a trial: the times of Triton's interpreter say nothing about a GPU")
    measured = {"triton": env["triton"], "date": time.strftime("%Y-%m-%d")}
    check(cfg.op is None or is_tunable(cfg.op), f"kernels/{cfg.op}/triton.py has no candidates() to try")
    budget = Budget(cfg.limit)
    entries = store_parameters(cfg.configs, path, measured, device, budget)
    what = f"op={cfg.op}" if cfg.op else "all ops"
    shapes = ", ".join(dict.fromkeys(shape for config in cfg.configs for shape in config.shape))
    check(entries, f"{what} {cfg.dtype}: nothing to tune here at {shapes}: choose another op, dtype, shape or minutes")
    best = [rows[-1] | choose_parameters(rows) for rows in entries.values()]
    print(printable(f"\n{table(best)}\n"))
    print(*gains(best), sep="\n")
    if budget.not_tried:
        print(f"not tried in {cfg.limit:g} minutes: {', '.join(budget.not_tried)}")
    print(printable(f"\ndone     {path}"))
    track_rows(tracker, f"tune-{cfg.op or 'all'}", cfg, {row["entry"]: row for row in best})


def is_tunable(op: str) -> bool:
    return "triton" in impls(op) and hasattr(backend(op, "triton"), "candidates")


def store_choices(configs: list[OpConfig], device: torch.device) -> None:
    """Store the fastest backend of each op, and print it."""
    for config in configs:
        if config.op == "attention":
            lines = fill_attention(config.dtype, config.rounds, device)
        elif config.op == "decode":
            lines = fill_decode(config.shape, config.dtype, config.rounds, device)
        else:
            lines = fill_op(config.op, config.shape, config.dtype, config.rounds, device)
        for line in lines:
            print(line, flush=True)


def store_parameters(
    configs: list[OpConfig], path: Path, measured: dict, device: torch.device, budget: Budget
) -> dict[str, list[dict]]:
    """Store the fastest launch parameters in the table at `path`, with `measured`: when, and with which Triton.

    Returns {name of an entry: one row for each shape}. If there are several ops, a line says which one cannot run
    here at which shape, and why.
    """
    entries: dict[str, list[dict]] = {}
    dtype, rounds = configs[0].dtype, configs[0].rounds
    try:
        for op, name in search_order({config.op: config.shape for config in configs}):
            try:
                load(op, "triton", device)  # raises Unavailable with the reason if it cannot run here
                with explain_out_of_memory(f"op={op} shape={name}", "the size: choose a smaller shape"):
                    for row in tune_shape(op, name, dtype, rounds, device, budget):
                        rows = entries.setdefault(row["entry"], [])
                        rows.append(row)
                        entry = {**choose_parameters(rows), "timed": row["timed"], **measured}
                        write_table(path, {row["entry"]: entry})
            except (Unavailable, OutOfMemory, *UNFIT) as error:
                if len(configs) == 1:
                    raise
                print(printable(f"without  {op} at {name}: {error}"), flush=True)
    except KeyboardInterrupt:
        print(printable(f"interrupted: {path} has the results so far (kernels: {len(entries)})"), file=sys.stderr)
        sys.exit(130)
    return entries


if __name__ == "__main__":
    main()
