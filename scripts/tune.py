"""Find and store the fastest launch parameters of our Triton kernels on this GPU: `python -m scripts.tune op=norm`.

Afterwards, every launch of such a kernel uses the stored parameters. lab/bench/tune.py describes the search.
"""

import sys
import time

from kernels.registry import backend, load
from kernels.tuned import read_table, table_paths, write_table
from lab.bench.op import OpConfig as Config
from lab.bench.tune import UNFIT, fastest, table, tune_shape
from lab.commands import command
from runtime.config import check
from runtime.device import environment, explain_out_of_memory, select_device


@command(Config, "tune", errors=UNFIT)
def main(cfg: Config) -> None:
    device = select_device(cfg.device)
    gpu = device.type == "cuda"
    check(gpu or not cfg.keep, "keep=true needs a GPU: the repo's tables are for GPUs, not for Triton's interpreter")
    load(cfg.op, "triton", device)  # raises Unavailable with the reason if it cannot run here
    check(hasattr(backend(cfg.op, "triton"), "candidates"), f"kernels/{cfg.op}/triton.py has no candidates() to try")
    user_table, repo_table = table_paths(device)
    path, env = repo_table if cfg.keep else user_table, environment(device)
    read_table(path)  # raises KernelError for a broken table before the search, and not after it
    measured = {"triton": env["triton"], "date": time.strftime("%Y-%m-%d")}
    print(f"{env['device']}, triton {env['triton']}, {cfg.dtype}, medians of {cfg.rounds} rounds")
    if not gpu:
        print("a trial: the times of Triton's interpreter say nothing about a GPU")
    entries: dict[str, list[dict]] = {}  # name of a table's entry -> one row for each shape
    try:
        for name in cfg.shape:
            with explain_out_of_memory(f"op={cfg.op} shape={name}", "the size: choose a smaller shape"):
                for row in tune_shape(cfg.op, name, cfg.dtype, cfg.rounds, device):
                    rows = entries.setdefault(row["entry"], [])
                    rows.append(row)
                    write_table(path, {row["entry"]: {**fastest(rows), "timed": row["timed"], **measured}})
    except KeyboardInterrupt:
        print(f"interrupted: {path} has the results so far (kernels: {len(entries)})", file=sys.stderr)
        sys.exit(130)
    print(f"\n{table([rows[-1] | fastest(rows) for rows in entries.values()])}\n\ndone     {path}")


if __name__ == "__main__":
    main()
