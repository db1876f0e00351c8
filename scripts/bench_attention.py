"""How attention grows with the context: `python -m scripts.bench_attention`

The literature's progression on this machine: the formula operator by operator, one fused kernel that still writes the
T x T scores, and kernels in tiles that never do (Dao et al. 2022, arXiv:2205.14135). Latency and peak memory, forward
and backward, for T = 512 ... 65,536; what does not fit is a row that says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kernels.registry import KernelError, Unavailable, contract, describe, impls
from runtime.config import check, cli
from runtime.device import GIB, OutOfMemory, environment, out_of_memory, pick, reset_memory
from runtime.meter import quantiles
from runtime.timing import in_turn, synchronize
from scripts.bench_kernels import DTYPES, both, contestants, error, folder, listed, outputs, write
from scripts.report import context_plot, context_table

ROOT = Path(__file__).resolve().parent.parent
LONGEST = {"cuda": 65536, "cpu": 2048}


@dataclass
class Config:
    impl: Any
    lengths: Any
    batch: int
    heads: int
    kv_heads: int | None
    head_dim: int
    window: int | None
    dtype: str
    device: str
    rounds: int
    keep: bool
    out_dir: str | None

    def __post_init__(self):
        check(self.dtype in DTYPES, f"dtype={self.dtype}: choose {', '.join(DTYPES)}")
        for key in ("batch", "heads", "head_dim", "rounds"):
            check(getattr(self, key) >= 1, f"{key}={getattr(self, key)}: it must be at least 1")
        check(self.window is None or self.window >= 1, f"window={self.window}: it must be at least 1, or null")
        shared = self.heads if self.kv_heads is None else self.kv_heads
        check(
            shared >= 1 and self.heads % shared == 0,
            f"kv_heads={self.kv_heads}: heads={self.heads} must be a multiple of it",
        )
        self.impl = listed(self.impl)
        known = [*impls("attention"), "compile"]
        for name in self.impl:
            check(name in known, f"impl={name}: attention has {', '.join(known)}")
        check(
            isinstance(self.lengths, list | None),
            f"lengths={self.lengths}: it takes a list: lengths='[{self.lengths}]'",
        )
        for length in self.lengths or []:
            check(isinstance(length, int) and length >= 1, f"lengths={length}: it takes whole numbers from 1 on")


def peak(work: Callable[[], object], device: torch.device) -> float | None:
    """GiB at most, besides what there was before."""
    if device.type != "cuda":
        work()
        return None
    synchronize(device)
    reset_memory(device)
    before = torch.cuda.memory_allocated(device)
    work()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / GIB


def measure(cfg: Config, length: int, functions: dict[str, Callable], device: torch.device) -> list[dict]:
    """The rows of one T, a row a contestant: those that fit take turns."""
    module, dtype = contract("attention"), DTYPES[cfg.dtype]
    shape = {"shape": (cfg.batch, length, cfg.heads, cfg.head_dim), "kv_heads": cfg.kv_heads, "window": cfg.window}
    inputs = module.inputs(**shape, dtype=dtype, device=device)
    dout = torch.randn_like(inputs["q"])
    rows, works = {}, {}
    for impl, function in functions.items():
        row = rows[impl] = {"impl": impl, "T": length, **{k: v for k, v in shape.items() if k != "shape"}}
        row |= {"batch": cfg.batch, "heads": cfg.heads, "head_dim": cfg.head_dim, "dtype": cfg.dtype, "status": "ok"}
        ways = {"forward": lambda f=function: outputs(f, inputs), "both": lambda f=function: both(f, inputs, [dout])}
        try:
            with out_of_memory(f"attention={impl} T={length}", "lengths"):
                named = "eager" if impl == "compile" else impl
                row["executed"] = describe("attention", named, **shape, dtype=dtype, device=device)
                row |= error(function, module, shape, dtype, device)
                row |= {f"{way}/peak_gib": peak(work, device) for way, work in ways.items()}
        except (OutOfMemory, Unavailable) as why:
            row["status"] = why.status if isinstance(why, OutOfMemory) else f"{why.status}: {why}"
            continue
        works |= {f"{impl} {way}": work for way, work in ways.items()}
    cost = module.cost(**shape, dtype=dtype)
    flops = {"forward": cost["forward"][0], "both": cost["forward"][0] + cost["backward"][0]}
    for name, seconds in in_turn(works, device, cfg.rounds).items():
        impl, way = name.split()
        p20, median, p80 = quantiles(seconds)
        rows[impl] |= {f"{way}/ms": 1e3 * median, f"{way}/ms/p20": 1e3 * p20, f"{way}/ms/p80": 1e3 * p80}
        rows[impl][f"{way}/tflops"] = flops[way] / median / 1e12
    return list(rows.values())


@cli(Config, configs=ROOT / "configs", name="bench_attention", errors=(KernelError,))
def main(cfg: Config) -> None:
    device = pick(cfg.device)
    path = folder(cfg.out_dir, "bench-attention")
    lengths = cfg.lengths or [2**n for n in range(9, 17) if 2**n <= LONGEST[device.type]]
    env, rows = environment(device), []
    for length in tqdm(lengths, disable=None, leave=False):
        torch.compiler.reset()
        rows += [
            {**row, "env": env} for row in measure(cfg, length, contestants("attention", cfg.impl, device), device)
        ]
    files = write(rows, "attention.jsonl", path, cfg.keep)
    print(
        f"{env['device']}, torch {env['torch']}, {cfg.dtype}, batch {cfg.batch}, {cfg.heads} heads of {cfg.head_dim}\n"
    )
    print(context_table(rows))
    if find_spec("matplotlib"):
        files.append(context_plot(rows, path / "attention.png"))
    print(f"\ndone     {', '.join(map(str, files))}")


if __name__ == "__main__":
    main()
