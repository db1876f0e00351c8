"""Train with both backends in turns, in workers, and compare the runs. The judge draws seeds and windows."""

import copy
import math
import random
import statistics
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from common.terminal import printable
from kernels.registry import OPS
from lab.judge.arm import Arm, Plan, arm_row, draw_plan, draw_prompts, growing_memory, run_arm
from lab.judge.audit import Question, audit, draw_segments, needed_states
from lab.judge.claim import Claim, choose_backends
from lab.proof.parity import ROUNDING
from lab.recipe import Recipe
from lab.rows import read_rows
from lab.sweep.compare import differences
from lab.sweep.table import speed
from model.cost import figures
from runtime.config import check
from runtime.resume import has_changed
from runtime.row import write_row

SERVE_GENERATION = [op for op in OPS if op != "loss"]
# The last arguments of train.py. They override the user's arguments
FIXED_WORDS = "kernels.check=false", "proof=false", "profile=false", "logger=none", "train.sample_tokens=0"
FIXED_WORDS += "train.eval_batches=1", "train.checkpoint_every=0", "logger.artifacts=false", "train.resume=null"
SLOWER_THAN_BEFORE = 0.9  # of the speed of a stored row
MAY_DIFFER = "seed", "git_commit", "proof", "train."  # settings in which a stored row may differ from the baseline's
MUST_AGREE = "train.batch_size", "train.block_size", "train.tokens_per_step", "train.cuda_graph"


def why_incomplete(config: Any) -> str | None:
    """Return why two trainings with this config cannot be compared completely; None if they can."""
    t = config.train
    reasons = {
        "model.dropout > 0 lets every backend draw random numbers of its own": config.model.dropout > 0,
        "train.on_nonfinite=skip hides steps": t.on_nonfinite != "stop",
        "with train.max_minutes the schedule depends on the speed": t.max_minutes is not None,
        "train.max_steps=null has no end": t.max_steps is None,
        "train.resume and train.stop_after make a part of a run": bool(t.resume or t.stop_after),
        "train.overfit repeats a batch": t.overfit,
        "sharded weights are not compared": config.parallel != "ddp",
        "optim=muon is not repeated, only AdamW": config.optim.name != "adamw",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def train_in_turns(
    claim: Claim,
    words: list[str],
    config: Any,
    recipe: Recipe,
    facts: dict,
    device: torch.device,
    repeats: int,
    folder: Path,
) -> dict[str, list[dict]]:
    """Return {against: rows, impl: rows}: `repeats` runs of each, in the order A B B A.

    `config` is train.py's, with the baseline's backend, and `words` are its arguments without the op's backend. Each
    repeat has a seed of its own. A run of the judged backend has its `parity` in its row. The first run that is not ok
    is the last one.
    """
    source, runs = random.SystemRandom(), {claim.against: [], claim.impl: []}
    sides = dict(zip((claim.against, claim.impl), claim.backends, strict=True))
    for repeat in range(repeats):
        seed, plan = source.randrange(2**31), draw_plan(config.train.max_steps, source)
        segments = draw_segments(plan, device, source, is_first_run=repeat == 0)
        order = list(sides.items())
        for name, backend in order if repeat % 2 == 0 else reversed(order):
            is_judged = name == claim.impl
            side = "judged" if is_judged else "baseline"
            run_folder = folder / f"{1 + sum(map(len, runs.values()))}-{claim.op}-{side}"
            check(not run_folder.exists(), f"{run_folder} exists: choose another out_dir for this verdict")
            prompts = None
            if is_judged and claim.op in SERVE_GENERATION and repeat == 0:
                prompts = draw_prompts(config.model, source)
            kept = needed_states(segments, plan) if is_judged else set()
            # the validation loss of the baseline is not compared
            evaluation = f"train.eval_every={config.train.max_steps if is_judged else 0}"
            all_words = [*words, choose_backends(claim, backend), *FIXED_WORDS, f"seed={seed}", evaluation]
            started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            arm = run_arm(all_words, run_folder, folder / f"worker-{side}", plan, kept, prompts)
            row = facts | {
                "name": run_folder.name,
                "started": started,
                "config": row_config(claim, config, backend, seed),
            }
            row = arm_row(arm, plan, row, config.train.tokens_per_step)
            if growth := growing_memory(arm):
                row["memory_growth"] = growth
            if is_judged and row["status"] == "ok":
                evaluated = replace(config.train, eval_batches=1, eval_every=config.train.max_steps)
                question = make_question(
                    replace(config, train=evaluated), replace(recipe, seed=seed), arm, device, plan, segments, prompts
                )
                row["parity"], row["status"] = judge_run(question, arm)
                row["no_generation"] = arm.no_generation
            runs[name].append(row)
            write_row(run_folder, row)
            for path in run_folder.glob("state-*"):
                path.unlink()
            result = f"{speed(row):,.0f} tok/s" if speed(row) else row["status"]
            print(printable(f"[{sum(map(len, runs.values()))}/{2 * repeats}] {name}  {result}"), flush=True)
            if row["status"] != "ok":
                return runs
    return runs


def row_config(claim: Claim, config: Any, backend: str, seed: int) -> dict:
    """Return the config of a run as its row has it. It names the judged backend, which this process never imports."""
    values = copy.deepcopy(asdict(config)) | {"seed": seed}
    if claim.op == "attention":
        values["attn"]["impl"] = backend
    else:
        values["kernels"][claim.op] = backend
    return values


def make_question(
    config: Any,
    recipe: Recipe,
    arm: Arm,
    device: torch.device,
    plan: Plan,
    segments: list[tuple[int, int]],
    prompts: tuple | None,
) -> Question:
    return Question(
        recipe=recipe,
        train=config.train,
        data=config.data,
        init_from=config.init_from,
        device=str(device),
        segments=segments,
        shifts=plan.loader_shifts,
        losses=arm.losses,
        folder=arm.folder,
        val_loss=arm.val_loss,
        prompts=None if arm.no_generation else prompts,
    )


def judge_run(question: Question, arm: Arm) -> tuple[dict, str]:
    """Return (the row's parity, its status) of a run of the judged backend."""
    if arm.val_loss is None:
        return {"ok": None, "why": "it sent no validation loss"}, "failed: it sent no validation loss"
    try:
        parity = audit(question, arm)
    except RuntimeError as error:
        return {"ok": None, "why": str(error)}, f"failed: it was not compared: {error}"
    return parity, "ok" if parity["ok"] else f"wrong: {parity['why']}"


def compare_losses(rows: list[dict], bases: list[dict]) -> dict[str, float]:
    """Return {"gap", "bound"}: how far the losses of both backends are apart, and the spread of the seeds.

    Both runs of a repeat have the same weights and batches at the start. Later their rounding errors grow, so the
    losses may be as far apart as those of two seeds, in the root mean square over the last half of the steps. Without a
    second seed, the spread is the change of the baseline's loss from one step to the next.
    """
    pairs = [(a["losses"], b["losses"]) for a, b in zip(rows, bases, strict=False)]
    gaps = [rms(later_differences(a, b)) for a, b in pairs]
    gap = math.nan if any(map(math.isnan, gaps)) else max(gaps)  # max() may pass over a NaN
    seeds = [base for _, base in pairs]
    others = [rms(later_differences(a, b)) for a, b in pairwise(seeds)]
    if not others:
        others = [rms([after - before for before, after in pairwise(seeds[0])])]
    return {"gap": gap, "bound": max(others) + ROUNDING * statistics.fmean(seeds[0])}


def later_differences(losses: list[float], others: list[float]) -> list[float]:
    half = len(losses) // 2
    return [a - b for a, b in zip(losses[half:], others[half:], strict=True)]


def rms(values: list[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values)) if values else 0.0


def impossible_speed(row: dict, config: Any, matmul_flops: float) -> str | None:
    """Return why a step is faster than its matmuls could be on this machine; None if it is not."""
    flops = figures(config.model, config.train.block_size)["flops_per_token"] * speed(row)
    if flops <= matmul_flops:
        return None
    return (
        f"it trains at {flops / 1e12:.3g} TFLOP/s, and a matmul alone reaches {matmul_flops / 1e12:.3g} on this machine"
    )


def slower_than_before(row: dict, device_slug: str) -> str | None:
    """Return a note if this baseline trained faster in a stored row of this repo on the same GPU; None if not."""
    stored = [
        speed(old)
        for old in read_rows(device_slug, "train")
        if not has_changed(old.get("config", {}).get("kernels"), row["config"]["kernels"])
        and old["config"].get("attn") == row["config"]["attn"]
        and speed(old)
        and all(line.startswith(MAY_DIFFER) and not line.startswith(MUST_AGREE) for line in differences(old, row))
    ]
    if not stored or speed(row) >= SLOWER_THAN_BEFORE * max(stored):
        return None
    return f"the baseline trained at {max(stored):,.0f} tokens/s in a stored row, and here at {speed(row):,.0f}"
