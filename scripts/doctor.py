"""What this machine has, and which kernels run on it and are right: `python -m scripts.doctor`

"ok" means that it ran: forward and backward at a small shape, compared with reference() in float64 by the rule of
kernels/check.py. Backends run in processes of their own, so one that crashes or hangs is a line like any other.
`--matrix` asks for every dtype, width and feature, and makes the table that the README shows.
"""

import os
import platform
import shutil
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kernels.attention.auto import FILL
from kernels.registry import OPS, KernelError, compiler, impls
from kernels.tuned import files, read
from runtime.config import check, cli
from runtime.device import GIB, environment, pick
from scripts.bench_kernels import ROOT, folder, listed, write
from scripts.probe import examine, matrix, usual
from scripts.support import tables, word

PACKAGES = ("flash-attn-4", "flash-attn", "liger-kernel", "quack-kernels", "wandb", "datasets", "tiktoken")
COLUMNS = 100


@dataclass
class Config:
    op: Any
    matrix: bool
    device: str
    limit: float
    keep: bool
    out_dir: str | None

    def __post_init__(self):
        self.op = listed(self.op) or list(OPS)
        for op in self.op:
            check(op in OPS, f"op={op}: choose {', '.join(OPS)}")
        check(self.limit > 0, f"limit={self.limit:g}: it must be more than 0 seconds")
        check(self.matrix or not self.keep, "keep=true keeps the rows of a matrix: add --matrix")


def gpu(device: torch.device, driver: str | None) -> str:
    """The GPU in a line, or why PyTorch has none."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return (
            f"{found.name}, {found.total_memory / GIB:.1f} GiB, compute capability {found.major}.{found.minor}, "
            f"driver {driver}; GPUs here: {torch.cuda.device_count()}"
        )
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as why:  # built without CUDA; no driver, or one that is too old
        return f"none: {textwrap.shorten(str(why), 200)}"
    return f"{torch.cuda.get_device_name()}, which device=cpu leaves alone"


def packages() -> str:
    found, absent = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(name)
    return "; ".join([", ".join(found)] * bool(found) + [f"absent: {', '.join(absent)}"] * bool(absent))


def disk(device: torch.device) -> str:
    """Free space for runs, token shards, tables and what compilers keep, a figure a file system."""
    triton = os.environ.get("TRITON_CACHE_DIR") or "~/.triton"
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    free = {}
    for path in map(Path, ("out", ".cache", files(device)[0].parent, triton, compiled)):
        whole = path.expanduser().absolute()
        there = next(parent for parent in (whole, *whole.parents) if parent.is_dir())
        free.setdefault(there.stat().st_dev, (shutil.disk_usage(there).free, []))[1].append(str(path))
    return "; ".join(f"{room / GIB:.1f} GiB free for {', '.join(names)}" for room, names in free.values())


def tuned(device: torch.device) -> Iterator[str]:
    """What was measured on this device, a line for launch parameters and one for the choices of attn=auto."""
    try:
        found = {path: read(path) for path in files(device)}
    except KernelError as broken:
        yield f"tuned    {broken}"
        return
    for label, measured, auto, fill in (
        ("tuned", "launch parameters", False, "python -m scripts.tune op=norm"),
        ("auto", "choices for attn=auto", True, FILL),
    ):
        counts = {path: sum(name.startswith("attention ") == auto for name in found[path]) for path in found}
        told = ", ".join(f"{count} in {path}" for path, count in counts.items() if count)
        yield f"{label:<8} {measured}: {told or f'none on this device: {fill}'}"


def machine(device: torch.device, env: dict) -> Iterator[str]:
    """What anybody would ask first, in lines."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    versions = {"python": env["python"], "torch": env["torch"], "cuda": torch.version.cuda}
    versions |= {"cudnn": torch.backends.cudnn.version(), "triton": env["triton"]}
    yield f"gpu      {gpu(device, env['driver'])}"
    yield f"host     {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.1f} GiB"
    yield f"versions {', '.join(f'{name} {found or None}' for name, found in versions.items())}"
    yield f"packages {packages()}"
    yield f"compiler {compiler() or 'none, and torch.compile needs one: apt install g++'}"
    yield f"disk     {disk(device)}"
    yield from tuned(device)


def wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


@cli(Config, configs=ROOT / "configs", name="doctor", errors=(KernelError,))
def main(cfg: Config) -> None:
    device = pick(cfg.device)
    env = environment(device)
    for told in machine(device, env):
        print(wrapped(told, indent=9))
    path = folder(cfg.out_dir, "doctor") if cfg.matrix else None
    if not cfg.matrix:
        print("\nop         backend           forward and backward, against reference() in float64", flush=True)
    asked = {(op, impl): (matrix if cfg.matrix else usual)(op, impl, device) for op in cfg.op for impl in impls(op)}
    groups = [[probe for values in columns.values() for probe in values.values()] for columns in asked.values()]
    bar = tqdm(examine(groups, device, cfg.limit), total=len(groups), disable=None if cfg.matrix else True, leave=False)
    rows, broken, counts = [], [], Counter()
    for ((op, impl), columns), statuses in zip(asked.items(), bar, strict=True):
        each = iter(statuses)
        answers = {column: {value: next(each) for value in values} for column, values in columns.items()}
        rows.append({"op": op, "impl": impl, "answers": answers, "env": env})
        counts.update(map(word, statuses))
        for column, values in answers.items():
            for value, status in values.items():
                found, _, text = status.partition(": ")
                if found in ("wrong", "failed"):
                    broken.append(f"error: {op}={impl} {column} {value} {status}")
                if not cfg.matrix:
                    text = f"{column}, {text}" if found == "ok" else text
                    print(wrapped(f"{op:<10} {impl:<17} {found:<12} {text}", indent=42), flush=True)
    if cfg.matrix:
        print(f"\n{tables(rows)}")
        kept = write(rows, "support.jsonl", path, cfg.keep)
        print(f"\nrows     {', '.join(map(str, kept))}")
    total = f"{counts.total()} answers of {len(rows)} backends"
    print(f"\ndone     {total}: {', '.join(f'{count} {name}' for name, count in counts.items())}", flush=True)
    if broken:
        print("\n".join(broken), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    sys.argv = ["matrix=true" if argument == "--matrix" else argument for argument in sys.argv]
    main()
