"""Measure each backend of an op: `python -m scripts.bench_kernels op=norm`.

The backends take turns, forward and backward, with each other and with the ceiling: a copy of as many bytes, or the
op's bare matmuls. A row has times, the error against float64, and the memory besides inputs, outputs and gradients.
"""

import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from tqdm import tqdm

from kernels.registry import check_name, contract
from lab.bench.op import DTYPES, OpConfig, as_list, measure
from lab.commands import command
from lab.report.bench_panels import draw_roofline
from lab.report.tables import KERNEL_COLUMNS, columns_table
from lab.rows import track_rows, write_rows
from runtime.config import check
from runtime.device import environment, explain_out_of_memory, select_device
from runtime.folders import make_folder
from runtime.timing import measured_bandwidth, measured_flops
from runtime.trackers import LoggerConfig, Tracker


@dataclass
class Config(OpConfig):
    impl: Any
    out_dir: str | None
    logger: LoggerConfig

    def __post_init__(self):
        super().__post_init__()
        self.impl = as_list(self.impl)
        for name in self.impl:
            if name != "compile":
                check_name(self.op, name, key="impl")


@command(Config, "bench_kernels")
def main(cfg: Config) -> None:
    device, tracker = select_device(cfg.device), Tracker(cfg.logger)
    folder = make_folder(cfg.out_dir, f"bench-{cfg.op}")
    env, rows = environment(device), []
    copy, matmul = measured_bandwidth(device) / 1e12, measured_flops(device, DTYPES[cfg.dtype]) / 1e12
    for name in tqdm(cfg.shape, disable=None, leave=False):
        start = time.perf_counter()
        torch.compiler.reset()
        shape = (contract(cfg.op).SHAPES | contract(cfg.op).CASES)[name]
        size = " x ".join(f"{side:,}" for side in shape["shape"])
        tqdm.write(f"{name:<12} {size}, {cfg.dtype}, {cfg.rounds} rounds", file=sys.stdout)
        sys.stdout.flush()  # on a CPU, a large shape takes minutes
        with explain_out_of_memory(f"op={cfg.op} shape={name}", "the size: choose a smaller shape"):
            new_rows, reasons = measure(cfg.op, name, shape, cfg.impl, cfg.dtype, cfg.rounds, device)
        for impl, reason in reasons.items():
            tqdm.write(f"{name:<12} without {impl}: {reason}", file=sys.stdout)
        new_rows = [{**row, "ceiling/tb_per_s": copy, "ceiling/tflops": matmul, "env": env} for row in new_rows]
        if new_rows:
            files = write_rows(new_rows, "kernels.jsonl", folder, cfg.keep)
        rows += new_rows
        seconds = time.perf_counter() - start
        tqdm.write(f"{name:<12} {len(new_rows)} contestants in {seconds:.0f} s", file=sys.stdout)
    check(bool(rows), f"op={cfg.op}: no backend takes these shapes; the lines above say why")
    versions = f"torch {env['torch']}, triton {env['triton']}"
    print(f"{env['device']}, {versions}, {cfg.dtype}, medians of {cfg.rounds} rounds\n")
    print(columns_table(KERNEL_COLUMNS, rows))
    if find_spec("matplotlib"):
        files += draw_roofline(rows, folder / "roofline.png")
    print(f"\nceiling  {copy:.3g} TB/s of a copy, {matmul:.3g} TFLOP/s of a large matmul")
    print(f"done     {', '.join(map(str, files))}")
    labels = [f"{row['op']}/{row['shape']}/{row['impl']}" for row in rows]
    track_rows(tracker, f"bench-{cfg.op}", cfg, dict(zip(labels, rows, strict=True)), folder)


if __name__ == "__main__":
    main()
