"""Sample rows, with the keys that the programs write, and the folders of a sweep of training and of generation."""

import json
import math
import random
from pathlib import Path

ENV = {"device": "NVIDIA H200", "driver": "580.159.04", "cuda": "13.0", "cudnn": 91900, "torch": "2.11.0+cu130"}
ENV |= {"triton": "3.6.0", "python": "3.12.3", "git_commit": "f3adfe01"}
FAMILIES = "gemm", "attention", "loss", "norm", "mlp", "elementwise and sums", "copies and fills", "optimizer", "other"
COMMAND = "python train.py +experiment=throughput"
DECODERS = {"blocks": ("compile", "sdpa", 0.5), "triton": ("eager", "sdpa", 0.2), "int8": ("eager", "sdpa", 0.16)}
WEIGHTS = {"weights": 0.46, "gradients": 0.46, "optimizer": 0.93}  # GiB

# kernels and attention -> ms a step, GiB, seconds of the first step, ms of each family
SPEEDS = {
    ("eager", "sdpa"): (163.5, 53.1, 0.6, (69, 19, 21, 20, 16, 9, 6, 1.5, 0.5)),
    ("compile", "sdpa"): (126.6, 28.5, 21.4, (68, 19, 9.7, 9, 11, 3, 3, 1.5, 0.4)),
    ("triton", "sdpa"): (126.9, 20.4, 6.9, (69, 19, 12, 7, 10, 3.2, 2.8, 1.5, 0.6)),
    ("triton", "flash"): (117.4, 18.7, 8.3, (68, 13, 9.5, 7, 10, 3.1, 2.8, 1.5, 0.6)),
    ("triton+compile", "flash"): (113.2, 19.4, 24.1, (68, 13, 9.4, 6.5, 9.5, 1.6, 1.6, 1.5, 0.5)),
}


def make_config(kernels="eager", attn="sdpa", precision="amp", **model) -> dict:
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


def executed(kernels: str, attn: str) -> dict[str, str | bool]:
    """Return what a row says about the kernels that ran."""
    chosen = make_config(kernels, attn)["kernels"]
    ran = {op: f"{impl} (torch 2.11.0+cu130)" for op, impl in (chosen | {"attention": attn}).items() if op != "compile"}
    return ran | {"compile": chosen["compile"]}


def make_row(kernels="eager", attn="sdpa", precision="amp", scale=1.0, parameters=124_475_904, seed=0, **model) -> dict:
    """Return the row of a training run with all of its keys. `scale` multiplies the times of SPEEDS."""
    ms, peak, first_step, family_ms = SPEEDS[kernels, attn]
    noise = random.Random(f"{kernels}{attn}{precision}{scale}{seed}")
    intervals = [ms * scale * noise.gauss(1, 0.004) / 1e3 for _ in range(11)]
    intervals = [seconds * (1 + 0.003 * (seed - 0.5)) for seconds in intervals]
    median, p20, p80 = (
        sorted(intervals)[5],
        sorted(intervals)[8],
        sorted(intervals)[2],
    )  # the p20 speed is a long interval
    kernels_words = f"kernels={kernels}".replace("+compile", " kernels.compile=true")
    families = {family: each * scale for family, each in zip(FAMILIES, family_ms, strict=True)}
    return {
        "name": f"124M-{kernels}-{attn}-{precision}",
        "status": "ok",
        "command": f"{COMMAND} {kernels_words} attn={attn} precision={precision} out_dir=out/x/1",
        "config": make_config(kernels, attn, precision, **model),
        "kernels": executed(kernels, attn),
        "env": ENV,
        "parameters": parameters,
        "world_size": 1,
        "steps": 60,
        "perf/tokens_per_sec": 65536 / median,
        "perf/tokens_per_sec/p20": 65536 / p20,
        "perf/tokens_per_sec/p80": 65536 / p80,
        "perf/laps_s": intervals,
        "perf/step_ms": 1e3 * median,
        "perf/first_step_s": first_step,
        "perf/mfu": 0.346 * 163.5 / (ms * scale),
        "perf/recompiles": 0,
        "perf/graph_breaks": 0,
        "perf/cache": "cold",
        "mem/peak_allocated_gib": peak,
        "train/loss": 5.8,
        "parity": make_parity(noise),
        "memory": make_memory(peak),
        "receipt": make_receipt(families, ms * scale),
    }


def make_parity(noise: random.Random) -> dict:
    reference = [10.9 - 5 * (1 - math.exp(-step / 9)) for step in range(20)]
    losses = [loss + noise.gauss(0, 0.002) for loss in reference]
    errors = {"loss_error": 0.0021, "loss_bound": 0.01, "gradient_error": 0.0034, "gradient_bound": 0.02}
    return {"steps": 20, "losses": losses, "reference": reference, **errors, "ok": True}


def make_memory(peak: float) -> dict:
    """Return the measured parts of the peak, in GiB, and a prediction whose peak is 3% higher."""
    measured = WEIGHTS | {"workspace": 0.22 * peak}
    measured |= {"activations": peak - sum(measured.values()), "peak": peak}
    predicted = measured | {"activations": measured["activations"] * 1.03, "peak": peak * 1.03}
    predicted["activations"] += 2 * predicted["peak"] - sum(predicted.values())
    return {"predicted": predicted, "measured": measured}


def make_receipt(families: dict[str, float], step_ms: float) -> dict:
    kernels = [
        {"name": f"{family}_kernel<128, 64>", "family": family, "calls": 12, "ms": ms / 2}
        for family, ms in families.items()
    ]
    busy_ms = sum(families.values())
    return {"families": families, "step_ms": step_ms, "busy_ms": busy_ms, "kernels": kernels, "wrong": None}


def make_generation_row(
    decode="blocks", kernels="compile", attn="sdpa", batch=1, prompt=128, ms=0.5, kv="auto", speculate=None, seed=0
) -> dict:
    """Return the row of a generation with proof=true. A step takes `ms`; with a draft it makes 1.6 tokens."""
    noise, accepted = random.Random(f"{decode}{kernels}{attn}{batch}{prompt}{seed}"), 1.6 if speculate else 1.0
    intervals = [ms * noise.gauss(1, 0.004) / 1e3 for _ in range(7)]
    rates = sorted(batch * accepted / seconds for seconds in intervals)
    training = make_config(kernels, attn, "bf16")
    return {
        "name": f"generate-124M-{kernels}-{attn}-{decode}-bf16",
        "status": "ok",
        "command": f"python -m scripts.generate kernels.decode={decode} batch={batch} out_dir=out/x/1",
        "config": {
            **{key: training[key] for key in ("seed", "precision", "attn", "logger")},
            "checkpoint": "random",
            "prompt_tokens": prompt,
            "max_new_tokens": 128,
            "batch": batch,
            "proof": True,
            "generate": {"kv": kv, "speculate": speculate, "draft_tokens": 4},
            "kernels": training["kernels"] | {"decode": decode},
            "model": training["model"],
        },
        "kernels": executed(kernels, attn) | {"decode": decode},
        "env": ENV,
        "gen/decode_tokens_per_sec": rates[3],
        "gen/decode_tokens_per_sec/p20": rates[1],
        "gen/decode_tokens_per_sec/p80": rates[5],
        "gen/step_ms": 1e3 * sorted(intervals)[3],
        "gen/laps_s": intervals,
        "gen/token_ms/p50": ms,
        "gen/token_ms/p95": 1.1 * ms,
        "gen/token_ms/p99": 1.2 * ms,
        "gen/ttft_ms": 7.25,
        "gen/prompt_tokens": prompt,
        "gen/tokens": 128,
        "gen/sequences": batch,
        "gen/accepted_tokens": accepted,
        "gen/bandwidth_utilisation": 0.06 / ms,
        "gen/warmup_s": 21.2,
        "mem/peak_allocated_gib": 0.34,
        "receipt": make_receipt({"gemm": 0.5 * ms, "attention": 0.2 * ms, "decode": 0.1 * ms}, ms),
        "proof": {"ok": True, "why": None, "tokens": 508, "ties": 3, "logits_error": 0.012, "logits_bound": 0.05},
    }


def make_kernel_row(op, impl, shape, ms, tflops, tb_per_s) -> dict:
    """Return a row of scripts.bench_kernels."""
    times = {"both/ms": ms, "both/ms/p20": ms * 0.99, "both/ms/p80": ms * 1.01}
    rates = {"both/tflops": tflops, "both/tb_per_s": tb_per_s, "ceiling/tb_per_s": 4.1, "ceiling/tflops": 770.0}
    errors = {"error/out": 3e-3, "error/gradients": 3e-3, "both/of_floor": 0.8}
    return {"op": op, "impl": impl, "shape": shape, "dtype": "bfloat16", "env": ENV, **times, **rates, **errors}


def make_context_row(kernels, attn, longest, generated, **model) -> dict:
    """Return a row of scripts.max_context."""
    return {
        "name": f"context-{kernels}",
        "status": "ok",
        "command": f"python -m scripts.max_context kernels={kernels} attn={attn}",
        "config": make_config(kernels, attn, "bf16", **model) | {"probe": None},
        "kernels": executed(kernels, attn),
        "env": ENV,
        "parameters": 124_475_904,
        "memory_gib": 139.8,
        "context/max_train": longest,
        "context/max_generate": generated,
        "context/train/seconds": 38.1,
        "context/train/peak_gib": 131.0,
        "context/train/prediction_error": 0.021,
    }


def make_attention_row(impl, T) -> dict:
    """Return a row of scripts.bench_attention; eager is out of memory above T = 4096."""
    shape = {"batch": 1, "heads": 12, "kv_heads": None, "head_dim": 64, "window": None, "documents": None}
    row = {"impl": impl, "T": T, **shape, "dtype": "bfloat16", "env": ENV}
    if T > 4096 and impl == "eager":
        return row | {"status": "oom"}
    return row | {"status": "ok", "both/ms": T * T / 1e7 * (4 if impl == "eager" else 1), "both/peak_gib": 1.0}


def write_row(folder: Path, row: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(row))


def write_generations(folder: Path) -> Path:
    """Write the folder of a sweep of generation and return it.

    Three decoders have two batches and two prompts each. One job is wrong, and one could not start.
    """
    settings = [(decode, batch, prompt) for decode in DECODERS for prompt in (128, 1024) for batch in (1, 8)]
    for number, (decode, batch, prompt) in enumerate(settings, 1):
        kernels, attn, ms = DECODERS[decode]
        row = make_generation_row(decode, kernels, attn, batch, prompt, ms * (1 + batch / 40 + prompt / 4096))
        if decode == "int8":
            why = "kernels.decode=int8 rounds the weights"
            row["proof"] |= {"ok": None, "why": why}
        write_row(folder / f"{number:02}-decode.{decode}-batch.{batch}-prompt_tokens.{prompt}", row)
    wrong = make_generation_row("mine", "eager", batch=8) | {"status": "wrong: 3 of 508 greedy tokens are others"}
    write_row(folder / "13-decode.mine", wrong)
    reason = "failed: kernels.decode=gone: no file kernels/decode/gone.py"
    write_row(folder / "14-decode.gone", {"command": wrong["command"], "name": "14-decode.gone", "status": reason})
    return folder


def write_sweep(folder: Path) -> Path:
    """Write a sweep's folder and return it.

    It has five choices in two runs each and again in bf16, two choices of 355M, three failed jobs, and rows of the
    benchmarks.
    """
    for number, (kernels, attn) in enumerate(SPEEDS, 1):
        write_row(folder / f"{number:02}-{kernels}-{attn}", make_row(kernels, attn, seed=0))
        write_row(folder / f"{number:02}-{kernels}-{attn}.2", make_row(kernels, attn, seed=1))
        write_row(folder / f"{number + 10}-{kernels}-{attn}-bf16", make_row(kernels, attn, "bf16", 0.965))
    for number, (kernels, attn) in enumerate((("eager", "sdpa"), ("triton", "flash")), 21):
        row = make_row(kernels, attn, "bf16", 2.6, 354_871_296, n_layer=24, n_head=16, n_embd=1024)
        write_row(folder / f"{number}-355m-{kernels}", row)
    oom = {"status": "oom", "parity": None, "config": make_config("eager", "eager"), "name": "124M-eager-eager-amp"}
    write_row(folder / "31-full", make_row(attn="sdpa") | oom)
    reason = "unavailable: attn=fa3 <needs> a GPU of compute capability 9.0"
    write_row(folder / "32-gone", {"command": make_row()["command"], "name": "32-gone", "status": reason})
    wrong = {"config": make_config("triton", "triton"), "status": "wrong: loss error 3.1e-01, bound 1.0e-02"}
    write_row(folder / "33-wrong", make_row("triton", "sdpa") | wrong)
    benchmarks = {
        "kernels": [
            make_kernel_row("norm", "eager", "124m", 0.9, 1.6, 1.7),
            make_kernel_row("norm", "triton", "124m", 0.4, 3.4, 3.8),
            make_kernel_row("mlp", "eager", "124m", 3.8, 488, 0.35),
            make_kernel_row("mlp", "triton", "1558m", 6.4, 590, 0.3),
        ],
        "context": [
            make_context_row("triton", "flash", 2_129_920, 6_291_456, pos="rope", checkpointing="block"),
            make_context_row("compile", "sdpa", 196_608, 1_048_576, pos="rope"),
        ],
        "attention": [make_attention_row(impl, T) for T in (1024, 2048, 4096, 8192) for impl in ("eager", "flash")],
    }
    for name, rows in benchmarks.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
