"""How attention grows with the context: `python -m scripts.bench_attention`

The literature's progression on this machine: the formula operator by operator, one fused kernel that still writes the
T x T scores, and kernels in tiles that never do (Dao et al. 2022, arXiv:2205.14135). Latency and peak memory, forward
and backward, for T = 512 ... 65,536; what does not fit is a row that says so.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kernels.attention.auto import entry, kind
from kernels.check import rounding
from kernels.registry import KernelError, Unavailable, contract, describe, impls, load, refusal
from kernels.tuned import files, read
from kernels.tuned import write as write_table
from runtime.config import check, cli
from runtime.device import GIB, OutOfMemory, environment, out_of_memory, pick, reset_memory
from runtime.meter import quantiles
from runtime.timing import in_turn, synchronize
from scripts.bench_kernels import DTYPES, ERROR_QUERIES, both, contestants, error, folder, listed, outputs, write
from scripts.figures import context_plot
from scripts.report import context_table

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 32768  # of a call, where the batch is not given
LONGEST = {"cuda": 65536, "cpu": 2048}
SHAPE = ("batch", "heads", "kv_heads", "head_dim", "window", "documents", "dtype")  # of a row, besides T


class Wrong(KernelError):
    """A contestant's answer is not the formula's: its speed is not shown."""

    status = "wrong"


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

    def __post_init__(self):
        check(self.dtype in DTYPES, f"dtype={self.dtype}: choose {', '.join(DTYPES)}")
        for key in ("heads", "head_dim", "rounds"):
            check(getattr(self, key) >= 1, f"{key}={getattr(self, key)}: it must be at least 1")
        self.batch = None if self.auto else self.batch
        check(not (self.auto and self.impl), "auto=true is the choice among all: leave impl out")
        for key in ("batch", "window", "documents"):
            value = getattr(self, key)
            check(value is None or value >= 1, f"{key}={value}: it must be at least 1, or null")
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


def wrong(errors: dict[str, float], cfg: Config, length: int, device: torch.device) -> str | None:
    """Why the figures of a contestant would be worth nothing: it is off by more than the rule of the tests, twice what
    eager loses at that dtype over as many keys, allows. Or None."""
    shape = {"shape": (1, min(ERROR_QUERIES, length), cfg.heads, cfg.head_dim), "keys": length}
    shape |= {"kv_heads": cfg.kv_heads, "window": cfg.window}
    dtype = DTYPES[cfg.dtype]
    eagers = error(load("attention", "eager", device), contract("attention"), shape, dtype, device)
    for key, off in errors.items():
        if not off <= 2 * eagers[key] + rounding(dtype, length):  # by eps / 2 one fp32 answer in 100 fell at T = 16
            return f"{key} is {off:.1e}, and eager's {eagers[key]:.1e}"
    return None


def works_of(
    impl: str, function: Callable, row: dict, shape: dict, cfg: Config, device: torch.device
) -> dict[str, Callable]:
    """What to time of a contestant: forward, both ways, and a decoding step if it has one. Leaves errors and memory in
    its row. KernelError, OutOfMemory: it cannot have a turn."""
    module, dtype, named = contract("attention"), DTYPES[cfg.dtype], "eager" if impl == "compile" else impl
    inputs = module.inputs(**shape, dtype=dtype, device=device)
    dout = torch.randn_like(inputs["q"])
    load("attention", named, device, needs=[name for name in ("window", "starts") if name in inputs])
    row["executed"] = describe("attention", named, **shape, dtype=dtype, device=device)
    row |= (errors := error(function, module, shape, dtype, device))
    if why := wrong(errors, cfg, inputs["q"].shape[1], device):
        raise Wrong(why)
    works = {"forward": lambda: outputs(function, inputs), "both": lambda: both(function, inputs, [dout])}
    row |= {f"{way}/peak_gib": peak(work, device) for way, work in works.items()}
    if not cfg.documents and not refusal(load("attention", named, device), "lengths"):
        (batch, length, *rest), shared = shape["shape"], {key: shape[key] for key in ("kv_heads", "window")}
        step = module.inputs(
            (batch, 1, *rest), keys=length, lengths=[length] * batch, **shared, dtype=dtype, device=device
        )
        works["decode"] = torch.no_grad()(lambda: function(**step))
    return works


def measure(cfg: Config, length: int, functions: dict[str, Callable], device: torch.device) -> list[dict]:
    """The rows of one T, a row a contestant: those that fit take turns."""
    batch = cfg.batch or max(1, TOKENS // length)
    shape = {"shape": (batch, length, cfg.heads, cfg.head_dim), "kv_heads": cfg.kv_heads, "window": cfg.window}
    if cfg.documents:
        full, rest = divmod(length, cfg.documents)
        shape["documents"] = [cfg.documents] * full + [rest] * (rest > 0)
    rows, works = {}, {}
    for impl, function in functions.items():
        row = rows[impl] = {"impl": impl, "T": length, **{key: getattr(cfg, key) for key in SHAPE}, "sequences": batch}
        row["status"] = "ok"
        try:
            with out_of_memory(f"attention={impl} T={length}", "lengths"):
                mine = works_of(impl, function, row, shape, cfg, device)
        except OutOfMemory as full:
            row["status"] = full.status
        except (Unavailable, Wrong) as why:
            row["status"] = f"{why.status}: {why}"
        else:
            works |= {f"{impl} {way}": work for way, work in mine.items()}
    cost = contract("attention").cost(**shape, dtype=DTYPES[cfg.dtype])
    flops = {"forward": cost["forward"][0], "both": cost["forward"][0] + cost["backward"][0]}
    for name, seconds in in_turn(works, device, cfg.rounds).items():
        impl, way = name.split()
        p20, median, p80 = quantiles(seconds)
        rows[impl] |= {f"{way}/ms": 1e3 * median, f"{way}/ms/p20": 1e3 * p20, f"{way}/ms/p80": 1e3 * p80}
        if way in flops:
            rows[impl][f"{way}/tflops"] = flops[way] / median / 1e12
    return list(rows.values())


def fastest(rows: list[dict], cfg: Config, device: torch.device) -> None:
    """Write the best of each T into this user's table for attn=auto, beside what it holds of other T."""
    window, documents = cfg.window, cfg.documents
    for decoding, key in ((False, "both/ms"), (True, "decode/ms")):
        name = entry(
            kind(decoding or None, window, documents),
            DTYPES[cfg.dtype],
            cfg.head_dim,
            cfg.heads // (cfg.kv_heads or cfg.heads),
        )
        found = {}
        for row in rows:
            if key in row:
                found.setdefault(str(row["T"]), {})[row["impl"]] = row[key]
        if found:
            path, _ = files(device)
            held = read(path).get(name, {"parameters": {}, "ms": {}})
            best = {length: min(times, key=times.get) for length, times in found.items()}
            write_table(path, {name: {"parameters": held["parameters"] | best, "ms": held["ms"] | found}})
            print(f"auto     {name}: {', '.join(f'{length} {impl}' for length, impl in best.items())} -> {path}")


@cli(Config, configs=ROOT / "configs", name="bench_attention", errors=(KernelError,))
def main(cfg: Config) -> None:
    device = pick(cfg.device)
    path = folder(cfg.out_dir, "bench-attention")
    lengths = cfg.lengths or [2**n for n in range(9, 17) if 2**n <= LONGEST[device.type]]
    env, rows = environment(device), []
    for length in tqdm(lengths, disable=None, leave=False):
        begun = time.perf_counter()
        torch.compiler.reset()
        functions = contestants("attention", cfg.impl, device)
        if cfg.auto:  # it chooses among the others, of which eager under torch.compile is none
            functions = {name: function for name, function in functions.items() if name not in ("auto", "compile")}
        found = measure(cfg, length, functions, device)
        written = write([{**row, "env": env} for row in found], "attention.jsonl", path, cfg.keep)
        rows += [{**row, "env": env} for row in found]
        tqdm.write(f"T {length:>9,}  {len(found)} contestants in {time.perf_counter() - begun:.0f} s", file=sys.stdout)
        if cfg.auto:
            fastest(found, cfg, device)
    print(
        f"{env['device']}, torch {env['torch']}, {cfg.dtype}, batch {cfg.batch}, {cfg.heads} heads of {cfg.head_dim}\n"
    )
    print(context_table(rows))
    if find_spec("matplotlib") and any("both/ms" in row for row in rows):
        written.append(context_plot(rows, path / "attention.png"))
    print(f"\ndone     {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
