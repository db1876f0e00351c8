"""Measure attention as the sequence length T grows: `python -m scripts.bench_attention`.

The backends follow the literature: the formula operator by operator, one fused kernel that still writes the T x T
scores, and tiled kernels that never write them (Dao et al. 2022, arXiv:2205.14135). The command measures time and peak
memory, forward and backward, for T = 512 ... 65,536. A backend that does not fit has a row with status oom.
"""

import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from tqdm import tqdm

from kernels.registry import check_name
from lab.bench.attention import AttentionShape, default_lengths, measure, record_fastest_at_length
from lab.bench.op import as_list, contestants
from lab.commands import command
from lab.report.bench_panels import draw_attention
from lab.report.tables import attention_table
from lab.rows import track_rows, write_rows
from runtime.config import check
from runtime.device import environment, select_device
from runtime.folders import make_folder
from runtime.trackers import LoggerConfig, Tracker


@dataclass
class Config:
    impl: Any
    lengths: Any
    batch: int | None
    heads: int
    kv_heads: int | None
    head_dim: int
    window: int | None
    documents: int | None
    dtype: str
    device: str
    rounds: int
    auto: bool
    keep: bool
    out_dir: str | None
    logger: LoggerConfig

    def __post_init__(self):
        check(self.rounds >= 1, f"rounds={self.rounds}: it must be at least 1")
        check(not (self.auto and self.impl), "auto=true compares all backends: leave impl out")
        self.impl = as_list(self.impl)
        for name in self.impl:
            if name != "compile":
                check_name("attention", name, key="impl")
        check(
            isinstance(self.lengths, list | None),
            f"lengths={self.lengths}: it must be a list: lengths='[{self.lengths}]'",
        )
        for length in self.lengths or []:
            check(isinstance(length, int) and length >= 1, f"lengths={length}: each must be an integer of at least 1")
        _ = self.shape  # checks its fields

    @property
    def shape(self) -> AttentionShape:
        batch = None if self.auto else self.batch
        return AttentionShape(batch, self.heads, self.kv_heads, self.head_dim, self.window, self.documents, self.dtype)


@command(Config, "bench_attention")
def main(cfg: Config) -> None:
    device, shape, tracker = select_device(cfg.device), cfg.shape, Tracker(cfg.logger)
    folder = make_folder(cfg.out_dir, "bench-attention")
    lengths = cfg.lengths or default_lengths(device)
    env, rows = environment(device), []
    for length in tqdm(lengths, disable=None, leave=False):
        start = time.perf_counter()
        torch.compiler.reset()
        functions = contestants("attention", cfg.impl, device)
        if cfg.auto:  # attn=auto calls another backend, but neither itself nor eager under torch.compile
            functions = {name: function for name, function in functions.items() if name not in ("auto", "compile")}
        new_rows = [{**row, "env": env} for row in measure(shape, length, functions, cfg.rounds, device)]
        files = write_rows(new_rows, "attention.jsonl", folder, cfg.keep)
        rows += new_rows
        seconds = time.perf_counter() - start
        tqdm.write(f"T {length:>9,}  {len(new_rows)} contestants in {seconds:.0f} s", file=sys.stdout)
        if cfg.auto:
            for line in record_fastest_at_length(new_rows, shape, device):
                print(line)
    heads = f"{cfg.heads} heads of {cfg.head_dim}"
    print(f"{env['device']}, torch {env['torch']}, {cfg.dtype}, batch {shape.batch}, {heads}\n")
    print(attention_table(rows))
    if find_spec("matplotlib"):
        files += draw_attention(rows, folder / "attention.png")
    print(f"\ndone     {', '.join(map(str, files))}")
    labels = [f"attention/{row['T']}/{row['impl']}" for row in rows]
    track_rows(tracker, "bench-attention", cfg, dict(zip(labels, rows, strict=True)), folder)


if __name__ == "__main__":
    main()
