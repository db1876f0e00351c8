"""Measure each backend of an op: `python -m scripts.bench_kernels op=norm`.

The backends take turns, forward and backward, with each other and with the ceiling: a copy of as many bytes, or the
op's bare matmuls. A row has times, the error against float64, the memory besides inputs, outputs and gradients, and the
lines of kernel code. The row of a backend that cannot run has only the status.
"""

import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from tqdm import tqdm

from kernels.names import TRAINING_OPS
from kernels.registry import check_name, contract, impls
from lab.bench.first_call import absent_backends, first_calls
from lab.bench.op import DTYPES, OpConfig, as_list, backend_of, measure
from lab.commands import command
from lab.proof.source_lines import kernel_lines
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
    first_call: bool
    suffix: str | None
    out_dir: str | None
    logger: LoggerConfig

    def __post_init__(self):
        check(self.op in TRAINING_OPS, f"op={self.op}: choose {', '.join(TRAINING_OPS)}")
        super().__post_init__()
        check(self.keep or not self.suffix, f"suffix={self.suffix} has no effect: add keep=true")
        self.impl = as_list(self.impl)
        for name in self.impl:
            if name != "compile":
                check_name(self.op, name, key="impl")


@command(Config, "bench_kernels")
def main(cfg: Config) -> None:
    device, tracker = select_device(cfg.device), Tracker(cfg.logger)
    folder = make_folder(cfg.out_dir, f"bench-{cfg.op}")
    env, rows = environment(device), []
    facts = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "env": env}
    copy, matmul = measured_bandwidth(device) / 1e12, measured_flops(device, DTYPES[cfg.dtype]) / 1e12
    for name in tqdm(cfg.shape, disable=None, leave=False):
        start = time.perf_counter()
        torch.compiler.reset()
        shape = (contract(cfg.op).SHAPES | contract(cfg.op).CASES)[name]
        size = " x ".join(f"{side:,}" for side in shape["shape"])
        tqdm.write(f"{name:<12} {size}, {cfg.dtype}, {cfg.rounds} rounds", file=sys.stdout)
        sys.stdout.flush()  # on a CPU, a large shape takes minutes
        with explain_out_of_memory(f"op={cfg.op} shape={name}", "the size: choose a smaller shape"):
            statuses, first_s = {} if cfg.impl else absent_backends(cfg.op, device), {}
            if cfg.first_call:  # a backend whose first call fails in its own process is not called in this one
                names = cfg.impl or [*(impl for impl in impls(cfg.op) if impl not in statuses), "compile"]
                answers = first_calls(cfg.op, names, shape, cfg.dtype, device)
                first_s = {impl: seconds for impl, (seconds, _) in answers.items()}
                statuses |= {impl: status for impl, (_, status) in answers.items() if status != "ok"}
            new_rows, reasons = measure(cfg.op, name, shape, cfg.impl, cfg.dtype, cfg.rounds, device, left_out=statuses)
        statuses |= reasons
        for impl, status in statuses.items():
            tqdm.write(f"{name:<12} without {impl}: {status}", file=sys.stdout)
        for row in new_rows:
            row |= {"first_call_s": first_s.get(row["impl"]), "ceiling/tb_per_s": copy, "ceiling/tflops": matmul}
            row |= {"lines": kernel_lines({cfg.op: backend_of(row["impl"])})[cfg.op], **facts}
        refused = [
            {"op": cfg.op, "shape": name, "impl": impl, "dtype": cfg.dtype, "status": status, **facts}
            for impl, status in statuses.items()
        ]
        if new_rows:
            files = write_rows([*new_rows, *refused], "kernels.jsonl", folder, cfg.keep, cfg.suffix)
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
