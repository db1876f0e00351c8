"""The fastest launch parameters of our Triton kernels on this GPU: `python -m scripts.tune op=norm`.

Runs the op and sees which kernels ask for parameters (kernels/tuned.py), then tries what their file calls candidates:
those that fit and give the default's answer take turns, and the fastest is kept if its median is below the default's
p20: of several shapes with the same widths, the one that is fastest over all of them. Whatever launches the kernel
afterwards starts with it.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.registry import KernelError, backend, contract, load
from kernels.tuned import files, override, read, write
from runtime.config import check, cli
from runtime.device import environment, out_of_memory, pick
from runtime.meter import quantiles
from runtime.timing import in_turn
from scripts.bench_kernels import DTYPES, ROOT, aligned, both, outputs
from scripts.bench_kernels import Measured as Config

UNFIT = (OutOfResources, PTXASError)  # parameters that ask for more than the GPU has


def search(cfg: Config, name: str, device: torch.device) -> Iterator[dict]:
    """For each kernel that the op launches at this shape, the entry of its best parameters and how it was found."""
    module, dtype = contract(cfg.op), DTYPES[cfg.dtype]
    inputs = module.inputs(**(module.SHAPES | module.CASES)[name], dtype=dtype, device=device)
    function, candidates = load(cfg.op, "triton", device), backend(cfg.op, "triton").candidates
    ways = {"forward": lambda: outputs(function, inputs), "both": lambda: both(function, inputs, douts)}
    with override({}) as asked:
        douts = [torch.randn_like(out) for out in ways["forward"]()]
        forward = list(asked)
        wanted = ways["both"]()
    best = {}

    def trial(way: str, kernel: str, parameters: dict) -> tuple:
        with override({**best, kernel: parameters}):
            return ways[way]()

    for kernel, (entry, default) in asked.items():
        way = "forward" if kernel in forward else "both"
        changed = (default | changes for changes in candidates(kernel, default))
        tried = {json.dumps(parameters): parameters for parameters in (default, *changed)}  # none twice
        works, bad = {}, {"does not fit": 0, "is wrong": 0}
        for text, parameters in tqdm(tried.items(), desc=f"{name} {kernel}", disable=None, leave=False):
            try:
                right = agree(trial("both", kernel, parameters), wanted, inputs, dtype)
            except UNFIT:
                bad["does not fit"] += 1
                continue
            bad["is wrong"] += not right
            if right or parameters == default:
                works[text] = partial(trial, way, kernel, parameters)
        ms = {text: [1e3 * s for s in quantiles(times)] for text, times in in_turn(works, device, cfg.rounds).items()}
        usual = json.dumps(default)
        row = {"entry": entry, "timed": way, "shape": name, "tried": len(tried), **bad}
        row |= {"usual": usual, "p20": ms[usual][0], "medians": {text: median for text, (_, median, _) in ms.items()}}
        yield row | (chosen := fastest([row]))
        best[kernel] = chosen["parameters"]


def fastest(rows: list[dict]) -> dict:
    """The parameters for all these shapes of one entry, by the product of their medians; the milliseconds add up."""
    usual, first = rows[0]["usual"], rows[0]["medians"]
    shared = [text for text in first if all(text in row["medians"] for row in rows)]
    product = {text: math.prod(row["medians"][text] for row in rows) for text in shared}
    best = min(shared, key=lambda text: product[text])
    if product[best] >= math.prod(row["p20"] for row in rows):
        best = usual
    names = ", ".join(row["shape"] for row in rows)
    ms, default_ms = (round(sum(row["medians"][text] for row in rows), 4) for text in (best, usual))
    return {"parameters": json.loads(best), "default_ms": default_ms, "ms": ms, "shape": names}


def agree(got: tuple, wanted: tuple, inputs: dict, dtype: torch.dtype) -> bool:
    """Whether they are the same but for the order of fp32 sums and a rounding to `dtype` that came out otherwise.

    Sums of n terms in two orders differ by about n^1/2 roundings, and numbers that hardly differ round to neighbours.
    """
    floating = [value for value in inputs.values() if isinstance(value, Tensor) and value.is_floating_point()]
    terms = max(max(each.shape[-1], each.numel() // each.shape[-1]) for each in floating)
    tolerance = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * math.sqrt(terms))
    pairs = [pair for group in zip(got, wanted, strict=True) for pair in zip(*group, strict=True)]
    return all(((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max()).item() for a, b in pairs)


def table(rows: list[dict]) -> str:
    head = ["kernel, widths, dtypes", "shape", "timed", "default ms", "best ms", "parameters", "tried"]
    lines = [head]
    for row in rows:
        bad = "".join(f", {row[why]} {why}" for why in ("does not fit", "is wrong") if row[why])
        parameters = ", ".join(f"{key} {value}" for key, value in row["parameters"].items())
        times = f"{row['default_ms']:.3f}", f"{row['ms']:.3f}"
        lines.append([row["entry"], row["shape"], row["timed"], *times, parameters, f"{row['tried']}{bad}"])
    return aligned(lines)


@cli(Config, configs=ROOT / "configs", name="tune", errors=(KernelError, *UNFIT))
def main(cfg: Config) -> None:
    device = pick(cfg.device)
    gpu = device.type == "cuda"
    check(gpu or not cfg.keep, "keep=true: the repo's tables are of GPUs, and this is Triton's interpreter on a CPU")
    load(cfg.op, "triton", device)  # or the reason why not
    check(hasattr(backend(cfg.op, "triton"), "candidates"), f"kernels/{cfg.op}/triton.py has no candidates() to try")
    mine, ours = files(device)
    path, env, found = ours if cfg.keep else mine, environment(device), {}
    read(path)  # better an error now
    measured = {"triton": env["triton"], "date": time.strftime("%Y-%m-%d")}
    print(f"{env['device']}, triton {env['triton']}, {cfg.dtype}, medians of {cfg.rounds} rounds")
    if not gpu:
        print("a trial: what is fastest in Triton's interpreter says nothing of a GPU")
    try:
        for name in cfg.shape:
            with out_of_memory(f"op={cfg.op} shape={name}", "the shape: choose another one"):
                for row in search(cfg, name, device):
                    alike = found.setdefault(row["entry"], [])
                    alike.append(row)
                    write(path, {row["entry"]: {**fastest(alike), "timed": row["timed"], **measured}})
    except KeyboardInterrupt:
        print(f"interrupted: what was found for {len(found)} kernels is in {path}", file=sys.stderr)
        sys.exit(130)
    print(f"\n{table([alike[-1] | fastest(alike) for alike in found.values()])}\n\ndone     {path}")


if __name__ == "__main__":
    main()
