"""What each backend of an op takes: `python -m scripts.bench_kernels op=norm`.

Forward, backward and both, in turn with the others and with the ceiling: a copy of as many bytes, or the op's bare
matrix products. Beside each speed stand the error against float64 and the memory besides inputs, outputs and gradients.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kernels.registry import OPS, KernelError, Unavailable, contract, describe, impls, load, unavailable
from kernels.tuned import slug
from runtime.config import check, cli
from runtime.device import GIB, environment, out_of_memory, pick, reset_memory
from runtime.meter import quantiles
from runtime.run import new_folder, writable
from runtime.timing import in_turn, measured_bandwidth, measured_flops
from scripts.collect import RESULTS
from scripts.figures import roofline

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ERROR_ROWS = 4096  # that are computed in float64 as well
ERROR_QUERIES = 16  # of attention: T x T scores in float64 would fill any memory


@dataclass
class Measured:
    """What is measured of an op, and how often: of this script and of tune.py."""

    op: str
    shape: Any
    dtype: str
    device: str
    rounds: int
    keep: bool

    def __post_init__(self):
        check(self.op in OPS, f"op={self.op}: choose {', '.join(OPS)}")
        check(self.dtype in DTYPES, f"dtype={self.dtype}: choose {', '.join(DTYPES)}")
        check(self.rounds >= 1, f"rounds={self.rounds}: it must be at least 1")
        shapes = contract(self.op).SHAPES | contract(self.op).CASES
        self.shape = listed(self.shape) or list(contract(self.op).SHAPES)
        for name in self.shape:
            check(name in shapes, f"shape={name}: {self.op} has {', '.join(shapes)}")


@dataclass
class Config(Measured):
    impl: Any
    out_dir: str | None

    def __post_init__(self):
        super().__post_init__()
        self.impl = listed(self.impl)
        known = [*impls(self.op), "compile"]
        for name in self.impl:
            check(name in known, f"impl={name}: {self.op} has {', '.join(known)}")


def listed(value: Any) -> list[str]:
    return [] if value is None else [str(each) for each in value] if isinstance(value, list) else [str(value)]


def contestants(op: str, names: list[str], device: torch.device) -> dict[str, Callable]:
    """Name -> function. KernelError: one that was asked for cannot run here."""
    asked = names or [name for name in impls(op) if not unavailable(op, name, device)]
    found = {name: load(op, name, device) for name in asked if name != "compile"}
    if "compile" in names or not names:
        found["compile"] = torch.compile(load(op, "eager", device), fullgraph=True)
    return found


def outputs(function: Callable, inputs: dict) -> tuple[Tensor, ...]:
    result = function(**inputs)
    return result if isinstance(result, tuple) else (result,)


def both(function: Callable, inputs: dict, douts: list[Tensor]) -> tuple:
    """(outputs, gradients) of one call."""
    out = outputs(function, inputs)
    leaves = [value for value in inputs.values() if isinstance(value, Tensor) and value.requires_grad]
    return out, torch.autograd.grad(out, leaves, douts)


def error(function: Callable, module: ModuleType, shape: dict, dtype: torch.dtype, device: torch.device) -> dict:
    """||got - exact|| / ||exact|| of the outputs and of the gradients, the largest of each, over fewer rows.

    What is zero, as dq where a query sees one key, is a difference of equals: its scale is the others'.
    """
    attention = module.__name__ == "kernels.attention"
    rows = 1 if attention else ERROR_ROWS if len(shape["shape"]) == 2 else shape["shape"][0]
    inputs = module.inputs(
        **shape | {"shape": (min(rows, shape["shape"][0]), *shape["shape"][1:])}, dtype=dtype, device=device
    )
    exact = {
        key: value.detach().double().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for key, value in inputs.items()
    }
    douts = [torch.randn_like(out) for out in outputs(function, inputs)]
    if attention:
        got, truth = last_queries(function, module.reference, inputs, exact, douts[0])
    else:
        got, truth = both(function, inputs, douts), both(module.reference, exact, [dout.double() for dout in douts])
    names = ("error/out", "error/gradients")
    found = {}
    for name, mine, theirs in zip(names, got, truth, strict=True):
        scales = [each.norm().item() for each in theirs]
        scales = [scale if scale > 1e-12 else max(*scales, 1e-30) for scale in scales]
        off = [(a.double() - b).norm().item() for a, b in zip(mine, theirs, strict=True)]
        found[name] = max(each / scale for each, scale in zip(off, scales, strict=True))
    return found


def last_queries(function: Callable, reference: Callable, inputs: dict, exact: dict, dout: Tensor) -> tuple:
    """(outputs, gradients) of both, as far as the last queries go: these see every key, and a gradient that enters
    there alone reaches every key and value."""
    n = min(ERROR_QUERIES, dout.shape[1])
    dout[:, :-n] = 0
    (out,), (dq, dk, dv) = both(function, inputs, [dout])
    tails = {"q": exact["q"].detach()[:, -n:].requires_grad_()}
    if "starts" in exact:
        tails["starts"] = exact["starts"][:, -n:]
    truth = both(reference, exact | tails, [dout[:, -n:].double()])
    return ((out[:, -n:],), (dq[:, -n:], dk, dv)), truth


def extra_memory(function: Callable, inputs: dict, douts: list[Tensor], device: torch.device) -> float | None:
    """GiB that forward and backward take at most, besides inputs, outputs and gradients."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    reset_memory(device)
    before = torch.cuda.memory_allocated(device)
    result = both(function, inputs, douts)
    held = sum(tensor.nbytes for group in result for tensor in group)
    return (torch.cuda.max_memory_allocated(device) - before - held) / GIB


def floors(module: ModuleType, shape: dict, dtype: torch.dtype, device: torch.device) -> dict[str, Callable]:
    """What no version beats: the bare products, where the op is made of them, or a copy of as many bytes."""
    works = {}
    cost = module.cost(**shape, dtype=dtype)
    for way in ("forward", "backward"):
        if hasattr(module, "products"):
            pairs = [
                [torch.randn(size, device=device).to(dtype) for size in ((m, k), (k, n))]
                for m, k, n in module.products(**shape)[way]
            ]
            works[f"floor {way}"] = lambda pairs=pairs: [a @ b for a, b in pairs]
        elif module.__name__ != "kernels.attention":
            source = torch.randint(256, (cost[way][1] // 2,), dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            works[f"floor {way}"] = lambda source=source, target=target: target.copy_(source)
    return works


def measure(cfg: Config, name: str, device: torch.device) -> list[dict]:
    """The rows of one shape."""
    module, dtype = contract(cfg.op), DTYPES[cfg.dtype]
    shape = (module.SHAPES | module.CASES)[name]
    inputs = module.inputs(**shape, dtype=dtype, device=device)
    functions, facts, douts = {}, {}, []
    for impl, function in contestants(cfg.op, cfg.impl, device).items():
        try:
            needs = [argument for argument in ("window", "starts", "lengths") if argument in inputs]
            load(cfg.op, "eager" if impl == "compile" else impl, device, needs)
            douts = douts or [torch.randn_like(out) for out in outputs(function, inputs)]
            errors = error(function, module, shape, dtype, device)
        except Unavailable as why:
            if cfg.impl:
                raise
            tqdm.write(f"{name:<12} without {impl}: {why}", file=sys.stdout)
            continue
        functions[impl] = function
        facts[impl] = {**errors, "extra_gib": extra_memory(function, inputs, douts, device)}
    works = floors(module, shape, dtype, device)
    for impl, function in functions.items():
        works[f"{impl} forward"] = lambda function=function: outputs(function, inputs)
        works[f"{impl} both"] = lambda function=function: both(function, inputs, douts)
    samples = {work: quantiles(seconds) for work, seconds in in_turn(works, device, cfg.rounds).items()}
    cost, rows = module.cost(**shape, dtype=dtype), []
    for impl in functions:
        row = {"op": cfg.op, "shape": name, "impl": impl, "dtype": cfg.dtype}
        row["executed"] = describe(cfg.op, "eager" if impl == "compile" else impl, **shape, dtype=dtype, device=device)
        times = {way: samples[f"{impl} {way}"] for way in ("forward", "both")}
        times["backward"] = tuple(b - f for b, f in zip(times["both"], times["forward"], strict=True))
        for way, (p20, median, p80) in times.items():
            flops, moved = map(sum, zip(*cost.values(), strict=True)) if way == "both" else cost[way]
            row |= {f"{way}/ms": 1e3 * median, f"{way}/ms/p20": 1e3 * p20, f"{way}/ms/p80": 1e3 * p80}
            row |= {f"{way}/tflops": flops / median / 1e12, f"{way}/tb_per_s": moved / median / 1e12}
            ways = ("forward", "backward") if way == "both" else (way,)
            floor = sum(samples[f"floor {each}"][1] for each in ways) if f"floor {ways[0]}" in samples else None
            row |= {f"{way}/floor_ms": floor and 1e3 * floor, f"{way}/of_floor": floor and floor / median}
        rows.append({**row, **facts[impl]})
    return rows


def table(rows: list[dict]) -> str:
    """For people; the rows are for programs."""
    unit = "tflops" if rows[0]["op"] != "norm" else "tb_per_s"
    head = ["shape", "impl", "forward ms", "both ms", f"both {unit}", "of the floor", "error", "gradients", "extra GiB"]
    lines = [head]
    for row in rows:
        share, extra = row["both/of_floor"], row["extra_gib"]
        lines.append(
            [
                row["shape"],
                row["impl"],
                f"{row['forward/ms']:.3f}",
                f"{row['both/ms']:.3f} ({row['both/ms/p20']:.3f} to {row['both/ms/p80']:.3f})",
                f"{row[f'both/{unit}']:.2f}",
                f"{100 * share:.1f}%" if share else "",
                f"{row['error/out']:.1e}",
                f"{row['error/gradients']:.1e}",
                "" if extra is None else f"{extra:.2f}",
            ]
        )
    return aligned(lines)


def aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def folder(out_dir: str | None, name: str) -> Path:
    """That of a benchmark's run, made. UserError: it cannot be."""
    path = Path(out_dir) if out_dir else new_folder(Path("out"), f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    with writable(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def write(rows: list[dict], name: str, path: Path, keep: bool) -> list[Path]:
    """Append the rows to `name` in this folder, and to that of their device in results/ where they are to be kept."""
    files = [path / name] + [RESULTS / slug(rows[-1]["env"]["device"]) / name] * keep
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    return files


@cli(Config, configs=ROOT / "configs", name="bench_kernels", errors=(KernelError,))
def main(cfg: Config) -> None:
    device = pick(cfg.device)
    path = folder(cfg.out_dir, f"bench-{cfg.op}")
    env, rows = environment(device), []
    ceilings = {
        "ceiling/tb_per_s": measured_bandwidth(device) / 1e12,
        "ceiling/tflops": measured_flops(device, DTYPES[cfg.dtype]) / 1e12,
    }
    for name in tqdm(cfg.shape, disable=None, leave=False):
        begun = time.perf_counter()
        torch.compiler.reset()
        with out_of_memory(f"op={cfg.op} shape={name}", "the shape: choose another one"):
            new = [{**row, **ceilings, "env": env} for row in measure(cfg, name, device)]
        files = write(new, "kernels.jsonl", path, cfg.keep)
        rows += new
        tqdm.write(f"{name:<12} {len(new)} contestants in {time.perf_counter() - begun:.0f} s", file=sys.stdout)
    print(
        f"{env['device']}, torch {env['torch']}, triton {env['triton']}, {cfg.dtype}, medians of {cfg.rounds} rounds\n"
    )
    print(table(rows))
    if find_spec("matplotlib"):
        files.append(roofline(rows, path / "roofline.png"))
    copy, matmul = ceilings.values()
    print(f"\nceiling  {copy:.3g} TB/s of a copy, {matmul:.3g} TFLOP/s of a large matmul")
    print(f"done     {', '.join(map(str, files))}")


if __name__ == "__main__":
    main()
