"""Prove a run of train.py with kernels that are not of this repo: the run goes into a worker.

The worker is train.py itself, with the same arguments. This process compares the run's losses, states and logits as the
judge does (audit.py), measures its speed by its own clock, and writes the row.
"""

import contextlib
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from common.files import read_bytes, read_line
from data import open_dataset
from kernels.registry import OPS, impl_by_op
from lab.bench.new_backends import WrongKernel, tracked_backends, tracked_files
from lab.bench.probe import ERRORS, Probe, case_probes, first_word
from lab.channel import is_worker
from lab.judge.arm import arm_row, draw_plan, draw_prompts, run_arm
from lab.judge.audit import audit, describe_parity, draw_segments, needed_states
from lab.judge.cases import judge_cases
from lab.judge.claim import training_call
from lab.judge.sandbox import isolation
from lab.judge.trial import make_question, why_incomplete
from lab.proof import Witness, Wrong
from lab.recipe import Recipe
from lab.sweep.table import speed
from lab.tampering import find_functions, process_settings
from model import cost
from model.config import PRECISIONS
from model.executed import called_kernels
from runtime import resume
from runtime.command import as_typed
from runtime.config import UserError, check
from runtime.device import Ceiling, environment, select_device
from runtime.ranks import Ranks, world_size
from runtime.run import Run, open_run
from runtime.signals import Signals

LIMIT = 120.0  # seconds of one case


def takes_over(cfg: Any) -> bool:
    """If the config has proof=true and new kernels, run train.py in a worker, prove the run, and return True.

    Otherwise, and in such a worker itself, return False. Raises UserError if the run cannot be compared, WrongKernel if
    a kernel is wrong in a case, and Wrong if the run is wrong.
    """
    if is_worker():
        Witness.functions, Witness.settings = find_functions(), process_settings()
        return False
    chosen = impl_by_op(called_kernels(cfg.model, cfg.kernels), cfg.attn, Recipe.of(cfg).ops)
    new = {op: impl for op, impl in chosen.items() if impl not in tracked_backends(op)}
    if not (cfg.proof and new):
        return False
    reason = why_incomplete(cfg) or ("a proof takes one process" if world_size() > 1 else None)
    names = ", ".join(f"{op}={impl}" for op, impl in new.items())
    if not tracked_files():
        names += " (git tracks no file here, so all kernels count as new: run git init && git add .)"
    check(reason is None, f"proof=true cannot compare this run with {names}: {reason}; pass proof=false")
    device, recipe, ranks = select_device(cfg.device), Recipe.of(cfg), Ranks()
    name = f"{cost.figures(cfg.model, cfg.train.block_size)['parameters'] / 1e6:.0f}M-proof-{cfg.precision}"
    folder, _ = resume.choose_folder(cfg.out_dir, None, name)
    with Signals(), open_run(folder, name, cfg, cfg.logger, False, ranks) as run:
        print(f"proof    {names}: in a worker ({isolation()})", flush=True)
        run.row |= cost.figures(cfg.model, cfg.train.block_size) | {"env": environment(device)}
        run.row |= {"isolation": isolation(), "checks": check_cases(cfg, recipe, new, device, folder)}
        prove_run(cfg, recipe, run, device)
    print(f"done     {run.folder / 'result.json'}")
    return True


def check_cases(cfg: Any, recipe: Recipe, new: dict[str, str], device: torch.device, folder: Path) -> dict[str, str]:
    """Return {op: how many cases are right} of the new backends, in the dtype of the device.

    Raises WrongKernel if a case is wrong, or if a backend refuses the call of this training.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    groups, statuses = [], {}
    for op, impl in new.items():
        groups.append(case_probes(op, impl, dtype))
        if op in OPS:
            call = training_call(op, recipe, (1, cfg.train.block_size))
            groups[-1]["training"] = Probe(op, impl, *call)
    for (op, impl), answers in zip(new.items(), judge_cases(groups, device, LIMIT, folder / "judge"), strict=True):
        for case, status in answers.items():
            if first_word(status) in ERRORS or (case == "training" and first_word(status) != "ok"):
                raise WrongKernel(f"{op}={impl} breaks the contract of kernels/{op}/__init__.py ({case}: {status})")
        statuses[op] = f"ok in {sum(first_word(status) == 'ok' for status in answers.values())} of {len(answers)} cases"
    return statuses


def prove_run(cfg: Any, recipe: Recipe, run: Run, device: torch.device) -> None:
    """Train in a worker, and complete the row. Raises Wrong if the run is not what eager PyTorch computes."""
    source = random.SystemRandom()
    open_dataset(cfg.data)  # the worker cannot write the shards
    plan = draw_plan(cfg.train.max_steps, source)
    plan = plan._replace(shifts=[0] * len(plan.windows))  # the batches are those of a run without proof
    segments = draw_segments(plan, device, source, is_first_run=True)
    prompts = draw_prompts(cfg.model, source)
    words = [as_typed(word) for word in sys.argv[1:]]
    words += ["logger=none", "logger.artifacts=false", "kernels.check=false", "train.resume=null"]
    inside = run.folder / "judge" / "worker"
    arm = run_arm(
        words, run.folder / "judge" / "run", inside, plan, needed_states(segments, plan), prompts, shows_output=True
    )
    if first_word(arm.status) == "wrong":
        raise Wrong(arm.status.removeprefix("wrong: "))
    check(arm.status == "ok", f"the run ended without a result: {arm.status.removeprefix('failed: ')}")
    facts = {"kernels": arm.figures.pop("kernels", recipe.chosen_kernels)}
    run.begin(**facts)
    take_files(inside / "run", run)
    run.row |= arm_row(arm, plan, {}, cfg.train.tokens_per_step)
    ceiling = Ceiling(device, PRECISIONS[cfg.precision][1], run.row["flops_per_token"])
    run.row |= ceiling.figures(speed(run.row))
    try:
        run.row["parity"] = audit(make_question(cfg, recipe, arm, device, plan, segments, prompts), arm)
    except RuntimeError as error:
        raise UserError(f"the run was not compared: {error}") from error
    shutil.rmtree(run.folder / "judge", ignore_errors=True)
    parity = run.row["parity"]
    print(f"parity   {describe_parity(parity)}")
    print(f"speed    {speed(run.row) or 0:,.0f} tokens/s by the clock of this process")
    if not parity["ok"]:
        raise Wrong(parity["why"])


def take_files(source: Path, run: Run) -> None:
    """Move the worker's checkpoints and texts into the run's folder, and log the figures that it logged."""
    if source.is_symlink():  # it leads to files that are not the worker's
        return
    for name in ("checkpoints", "sample.txt", "trace.json.gz", "memory.pickle"):
        if (source / name).exists() and not (source / name).is_symlink():
            shutil.move(source / name, run.folder / name)
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        for line in read_bytes(source / "metrics.jsonl").splitlines():
            figures = read_line(line)
            run.log(int(figures.pop("step")), figures)
