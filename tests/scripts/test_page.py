"""The page of a report in a real browser, from rows as train.py and the benchmarks write them."""

import json
import math
import random
import re
import shutil
import subprocess
import sys

import pytest

from runtime import compare
from runtime.config import UserError
from scripts import report
from scripts.page import choices, page, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ENV = {"device": "NVIDIA H200", "driver": "580.159.04", "cuda": "13.0", "cudnn": 91900, "torch": "2.11.0+cu130"}
ENV |= {"triton": "3.6.0", "python": "3.12.3", "git_commit": "f3adfe01"}
FAMILIES = ("gemm", "attention", "loss", "norm", "mlp", "elementwise", "copy", "optimizer", "other")
WEIGHTS = {"weights": 0.46, "gradients": 0.46, "optimizer": 0.93}

# kernels and attention: ms a step, GiB, first step, ms of each family
SPEEDS = {
    ("eager", "sdpa"): (163.5, 53.1, 0.6, (69, 19, 21, 20, 16, 9, 6, 1.5, 0.5)),
    ("compile", "sdpa"): (126.6, 28.5, 21.4, (68, 19, 9.7, 9, 11, 3, 3, 1.5, 0.4)),
    ("triton", "sdpa"): (126.9, 20.4, 6.9, (69, 19, 12, 7, 10, 3.2, 2.8, 1.5, 0.6)),
    ("triton", "flash"): (117.4, 18.7, 8.3, (68, 13, 9.5, 7, 10, 3.1, 2.8, 1.5, 0.6)),
    ("triton+compile", "flash"): (113.2, 19.4, 24.1, (68, 13, 9.4, 6.5, 9.5, 1.6, 1.6, 1.5, 0.5)),
}


def config(kernels="eager", attn="sdpa", precision="amp", **model):
    impl, compile = kernels.partition("+")[0], "compile" in kernels
    impl = "eager" if impl == "compile" else impl
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "pos": "learned"}
    return {
        "seed": 1337,
        "precision": precision,
        "kernels": {"norm": impl, "mlp": impl, "loss": impl, "compile": compile},
        "attn": {"impl": attn, "version": None},
        "model": shape | {"checkpointing": "none"} | model,
        "train": {"batch_size": 64, "block_size": 1024, "tokens_per_step": 65536, "max_steps": 60, "eval_every": 0},
        "logger": {"name": "none", "project": "hotswap"},
    }


def row(kernels="eager", attn="sdpa", precision="amp", scale=1.0, parameters=124_475_904, seed=0, **model):
    """That of a run, with all that train.py writes."""
    ms, peak, first, times = SPEEDS[kernels, attn]
    noise = random.Random(f"{kernels}{attn}{precision}{scale}{seed}")
    laps = [ms * scale * noise.gauss(1, 0.004) / 1e3 for _ in range(11)]
    laps = [lap * (1 + 0.003 * (seed - 0.5)) for lap in laps]
    middle, low, high = sorted(laps)[5], sorted(laps)[8], sorted(laps)[2]
    rates = {"": 65536 / middle, "/p20": 65536 / low, "/p80": 65536 / high}
    split = WEIGHTS | {"workspace": 0.22 * peak}
    split |= {"activations": peak - sum(split.values()), "peak": peak}
    foreseen = {key: value * 1.03 if key in ("activations", "peak") else value for key, value in split.items()}
    foreseen["activations"] += foreseen["peak"] - sum(value for key, value in foreseen.items() if key != "peak")
    reference = [10.9 - 5 * (1 - math.exp(-step / 9)) for step in range(20)]
    told = {family: each * scale for family, each in zip(FAMILIES, times, strict=True)}
    heaviest = [{"name": f"{family}_kernel<128, 64>", "family": family, "calls": 12, "ms": each / 2} for family, each in told.items()]
    parity = {"steps": 20, "losses": [loss + noise.gauss(0, 0.002) for loss in reference], "reference": reference}
    parity |= {"loss_error": 0.0021, "loss_bound": 0.01, "gradient_error": 0.0034, "gradient_bound": 0.02, "ok": True}
    return {
        "name": f"124M-{kernels}-{attn}-{precision}",
        "status": "ok",
        "command": f"python train.py +experiment=throughput kernels={kernels} attn={attn} precision={precision} out_dir=out/x/1",
        "config": config(kernels, attn, precision, **model),
        "kernels": {"norm": "eager (torch 2.11.0+cu130)", "attention": f"{attn} (torch 2.11.0+cu130)", "compile": False},
        "env": ENV,
        "parameters": parameters,
        "world_size": 1,
        "steps": 60,
        **{f"perf/tokens_per_sec{p}": rate for p, rate in rates.items()},
        "perf/laps_s": laps,
        "perf/step_ms": 1e3 * middle,
        "perf/first_step_s": first,
        "perf/mfu": 0.346 * 163.5 / (ms * scale),
        "perf/recompiles": 0,
        "perf/graph_breaks": 0,
        "perf/cache": "cold",
        "mem/peak_allocated_gib": peak,
        "train/loss": 5.8,
        "parity": parity,
        "memory": {"predicted": foreseen, "measured": split},
        "receipt": {"families": told, "step_ms": ms * scale, "busy_ms": sum(told.values()), "kernels": heaviest, "wrong": None},
    }


def kernel(op, impl, shape, ms, tflops, tb_per_s):
    rate = {"both/ms": ms, "both/ms/p20": ms * 0.99, "both/ms/p80": ms * 1.01, "both/tflops": tflops, "both/tb_per_s": tb_per_s}
    errors = {"error/out": 3e-3, "error/gradients": 3e-3, "both/of_floor": 0.8}
    return {"op": op, "impl": impl, "shape": shape, "dtype": "bfloat16", "env": ENV, **rate, **errors} | {"ceiling/tb_per_s": 4.1, "ceiling/tflops": 770.0}


def context(kernels, attn, longest, generated, **model):
    found = {"context/max_train": longest, "context/max_generate": generated, "memory_gib": 139.8, "parameters": 124_475_904}
    found |= {"context/train/seconds": 38.1, "context/train/peak_gib": 131.0, "context/train/prediction_error": 0.021}
    told = config(kernels, attn, "bf16", **model) | {"probe": None}
    command = f"python -m scripts.max_context kernels={kernels} attn={attn}"
    return {"name": f"context-{kernels}", "status": "ok", "command": command, "config": told, "env": ENV, **found}


def sweep(folder):
    """A sweep's folder: five choices in two runs each and in bf16, 355M, what fell, and the benchmarks beside them."""
    rows = {}
    for number, (kernels, attn) in enumerate(SPEEDS, 1):
        for run in (0, 1):
            rows[f"{number:02}-{kernels}-{attn}{'.2' * run}"] = row(kernels, attn, seed=run)
        rows[f"{number + 10}-{kernels}-{attn}-bf16"] = row(kernels, attn, "bf16", 0.965)
    for number, (kernels, attn) in enumerate((("eager", "sdpa"), ("triton", "flash")), 21):
        rows[f"{number}-355m-{kernels}"] = row(kernels, attn, "bf16", 2.6, 354_871_296, n_layer=24, n_embd=1024)
    bare = {key: row()[key] for key in ("command",)}
    rows["31-full"] = row(attn="sdpa") | {"status": "oom", "config": config("eager", "eager"), "name": "124M-eager-eager-amp"}
    rows["32-gone"] = bare | {"name": "32-gone", "status": "unavailable: attn=fa3 <needs> a GPU of compute capability 9.0"}
    wrong = row("triton", "sdpa") | {"config": config("triton", "triton"), "status": "wrong: loss error 3.1e-01, bound 1.0e-02"}
    rows["33-wrong"] = wrong
    for name, each in rows.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "result.json").write_text(json.dumps(each))
    benches = {
        "kernels": [kernel("norm", "eager", "124m", 0.9, 1.6, 1.7), kernel("norm", "triton", "124m", 0.4, 3.4, 3.8),
                    kernel("mlp", "eager", "124m", 3.8, 488, 0.35), kernel("mlp", "triton", "1558m", 6.4, 590, 0.3)],
        "context": [context("triton", "flash", 2_129_920, 6_291_456, pos="rope", checkpointing="block"),
                    context("compile", "sdpa", 196_608, 1_048_576, pos="rope")],
        "attention": [{"impl": impl, "T": T, "batch": 1, "heads": 12, "kv_heads": None, "head_dim": 64, "window": None,
                       "documents": None, "dtype": "bfloat16", "status": "ok" if T < 8192 or impl == "flash" else "oom", "env": ENV}
                      | ({"both/ms": T * T / 1e7 * (4 if impl == "eager" else 1), "both/peak_gib": 1.0} if T < 8192 or impl == "flash" else {})
                      for T in (1024, 2048, 4096, 8192) for impl in ("eager", "flash")],
    }  # fmt: skip
    for name, found in benches.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    return folder
