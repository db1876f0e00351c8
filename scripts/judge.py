"""Settle a claim: `python -m scripts.judge op=norm impl=mine against=triton`.

Is the backend right, in every case of its contract? Does training with it run faster than with the other backend? What
does it change in memory and losses? The answer is one page, and the exit code.
"""

import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from common.files import write_atomically
from common.terminal import printable, shell_command
from data import DataError, open_dataset
from kernels.registry import load
from kernels.tuned import device_slug
from lab.bench.probe import Probe
from lab.commands import command, compose, take_training
from lab.judge.alone import Alone, benchmark
from lab.judge.cases import judge_cases
from lab.judge.claim import (
    EXIT_CODES,
    Claim,
    check_claim,
    choose_backends,
    ignored_settings,
    make_probes,
    training_call,
    training_words,
    undecided_answers,
    wrong_answers,
)
from lab.judge.sandbox import Ended, changed_files, changed_packages, digest_repo, isolation, stamp_packages
from lab.judge.trial import (
    compare_losses,
    impossible_speed,
    slower_than_before,
    train_in_turns,
    why_incomplete,
)
from lab.judge.verdict import FASTER_NEEDS, Evidence, judge_claim, page, speed_figure
from lab.recipe import Recipe
from lab.rows import track_rows, write_rows
from lab.sweep.compare import ratio
from lab.sweep.table import speed
from model import cost
from model.capture import reason_against
from model.config import PRECISIONS
from runtime.command import command_line
from runtime.config import UserError, check, parse
from runtime.device import environment, measured_flops, select_device
from runtime.folders import make_folder
from runtime.signals import Signals
from runtime.trackers import LoggerConfig, Tracker
from train import Config as TrainConfig
from train import complete_config

GROUPS = 2, 8  # workers for the cases, on a CPU and on a GPU. Most of their time is compilation, on one core each
# A step may save so many times what the op's calls take alone, and this share of the step
SAVING, SAVING_OF_STEP = 2.0, 0.05
TOO_GOOD = 1.05  # alone, a kernel may seem this much faster than its floor, because both times vary
LAUNCHES_MS = 0.02  # in a shorter floor, the gaps between its kernels count, and a CUDA graph has shorter ones


@dataclass
class Config:
    op: str
    impl: str | None
    against: str
    training: list[str]
    repeats: int
    rounds: int
    limit: float
    device: str
    keep: bool
    out_dir: str | None
    logger: LoggerConfig

    def __post_init__(self):
        check_claim(Claim(self.op, self.impl, self.against))
        check(self.repeats >= 1, f"repeats={self.repeats}: it must be at least 1")
        check(self.rounds >= 1, f"rounds={self.rounds}: it must be at least 1")
        check(self.limit > 0, f"limit={self.limit:g}: it must be more than 0 seconds")


@command(Config, "judge", errors=(DataError,))
def main(cfg: Config) -> None:
    tracker = Tracker(cfg.logger)
    folder = make_folder(cfg.out_dir, f"judge-{cfg.op}")
    with Signals():  # the workers end with this block
        claim = Claim(cfg.op, cfg.impl, cfg.against)
        row = settle(claim, cfg.training, cfg.repeats, cfg.rounds, cfg.limit, cfg.device, folder)
    files = write_rows([row], "judge.jsonl", folder, cfg.keep)
    write_atomically(folder / "judge.md", page(row).encode(errors="backslashreplace"))
    files.append(folder / "judge.md")
    if "ratio" in row and find_spec("matplotlib"):
        files.append(speed_figure(row, folder / "judge.png"))
    print(printable(f"\n{page(row)}\ndone     {', '.join(map(str, files))}"), flush=True)
    track_rows(tracker, f"judge-{cfg.op}", cfg, {f"{cfg.op}/{cfg.impl}": row}, folder)
    if row["verdict"] not in EXIT_CODES:
        raise UserError(f"no verdict: {row['reason']}")
    sys.exit(EXIT_CODES[row["verdict"]])


def judge_command(training: list[str]) -> str:
    """Return the shell command that judges this claim again."""
    words = [word for word in shlex.split(command_line()) if not word.startswith(("out_dir=", "training="))]
    return shell_command(*words, *(["--", *training] if training else []))


def settle(
    claim: Claim, training: list[str], repeats: int, rounds: int, limit: float, device_name: str, folder: Path
) -> dict:
    """Test the backend, train with both backends, measure the op alone. Return the row of the verdict.

    The backend runs in workers only (lab/judge/sandbox.py). This process never imports it.
    """
    device, chosen = select_device(device_name), f"{claim.op}={claim.impl}"
    repo, packages = digest_repo(), stamp_packages()
    load(claim.op, claim.backends[0], device)  # raises Unavailable here, before a minute of probes
    words = training_words(claim, device, training)
    config, recipe = read_training([*words, choose_backends(claim, claim.backends[0])])
    shape = config.train.batch_size, config.train.block_size
    reason = why_incomplete(config)
    check(reason is None, f"this training cannot be compared, so it gives no verdict: {reason}")
    about = {"command": judge_command(training), "env": environment(device), "isolation": isolation()}
    print(printable(f"judge    {claim}, on {about['env']['device']}\nworkers  {isolation()}"), flush=True)
    for line in ignored_settings(claim.op, recipe):
        print(f"note     {line}", flush=True)
    statuses = probe(make_probes(claim, recipe, shape), device, limit, folder)
    in_training = statuses[f"{recipe.precision} training"]
    check(not in_training.startswith("unavailable"), f"{chosen} cannot run this training: {in_training}")
    evidence = Evidence(statuses, {}, [])
    if not wrong_answers(statuses) and not undecided_answers(statuses):
        print(f"right    in {sum(status.startswith('ok') for status in statuses.values())} cases", flush=True)
        evidence = gather_evidence(claim, words, config, recipe, about["env"], device, repeats, rounds, limit, folder)
        evidence = evidence._replace(statuses=statuses)
    if changed := changed_files(repo, digest_repo()) or changed_packages(packages):
        wrong = f"wrong: files of the repo or of packages changed while it ran: {', '.join(changed[:5])}"
        evidence = evidence._replace(statuses=statuses | {"the code": wrong})
    return {**judge_claim(claim, evidence), "date": time.strftime("%Y-%m-%d"), **about}


def probe(probes: dict[str, Probe], device: torch.device, limit: float, folder: Path) -> dict[str, str]:
    """Return {case: status}, in the order of the cases."""
    count = GROUPS[device.type == "cuda"]
    cases = list(probes)
    groups = [{case: probes[case] for case in cases[first::count]} for first in range(count)]
    statuses = {case: status for group in judge_cases(groups, device, limit, folder) for case, status in group.items()}
    return {case: statuses[case] for case in cases}


def gather_evidence(
    claim: Claim,
    words: list[str],
    config: TrainConfig,
    recipe: Recipe,
    env: dict,
    device: torch.device,
    repeats: int,
    rounds: int,
    limit: float,
    folder: Path,
) -> Evidence:
    """Train in turns, and if no run is wrong, measure the op alone. The evidence has no statuses of cases yet."""
    open_dataset(config.data)  # no worker can write the shards
    facts = {"env": env, **cost.figures(config.model, config.train.block_size)}
    runs = train_in_turns(claim, words, config, recipe, facts, device, repeats, folder)
    judged, baseline = runs[claim.impl], runs[claim.against]
    if not (judged and baseline) or any(row["status"] != "ok" for row in (*judged, *baseline)):
        return Evidence({}, runs, [])
    if not all(map(speed, (*judged, *baseline))):  # one window of steps
        return Evidence({}, runs, [], compare_losses(judged, baseline))
    notes, rows = [], []
    matmul_flops = measured_flops(device, PRECISIONS[recipe.precision][1]) * (2 if recipe.precision == "fp8" else 1)
    impossible = next(filter(None, (impossible_speed(row, config, matmul_flops) for row in judged)), None)
    if note := slower_than_before(baseline[0], device_slug(env["device"])):
        notes.append(note)
    if reason := judged[0].get("no_generation"):
        notes.append(f"no logits of a generation were compared: {reason}")
    if growth := max(row.get("memory_growth", 0) for row in judged):
        notes.append(f"allocated memory grows by {growth / 2**20:.1f} MiB in each window")
    alone = Alone(
        claim.op, *training_call(claim.op, recipe, (config.train.batch_size, config.train.block_size)), device
    )
    try:
        [base] = benchmark(alone, [claim.against], rounds, folder / "alone-baseline", limit)
        in_graph = config.train.cuda_graph is not False and not reason_against(config.model, device)
        alone_ms = base["both/ms"] if in_graph else max(base["both/ms"], base["launched/ms"] or 0)
        impossible = impossible or impossible_saving(judged, baseline, alone_ms, config, claim.op)
        rows = [*benchmark(alone, [claim.impl], rounds, folder / "alone-judged", limit), base]
        impossible = impossible or impossible_alone(rows[0])
        for row in rows:
            if row["no_graph"] is not None:
                name = f"{claim.op}={row['impl']}"
                notes.append(
                    f"{name} alone: Python launched each call, because no CUDA graph took it: {row['no_graph']}"
                )
    except (Ended, torch.OutOfMemoryError) as error:  # the training has decided the verdict
        notes.append(f"no figures of {claim.op} alone: {error}")
    return Evidence({}, runs, rows, compare_losses(judged, baseline), impossible, tuple(notes))


def impossible_saving(
    judged: list[dict], baseline: list[dict], alone_ms: float, config: TrainConfig, op: str
) -> str | None:
    """Return why the op cannot have saved what a step saves; None if it can, or if the verdict would not be faster.

    `alone_ms` is the time of the baseline's call, forward and backward. In a step, calls may take longer than alone.
    Single runs vary too much: identical kernels once differed by 2.6x.
    """
    compared = ratio(judged, baseline)
    if compared is None or compared.verdict != "faster" or compared.runs < FASTER_NEEDS:
        return None
    base_ms, ms = (statistics.median(row["perf/step_ms"] for row in rows) for rows in (baseline, judged))
    train, layers = config.train, config.model.n_layer
    calls = {"loss": 1, "norm": 2 * layers + 1, "rms_norm": 2 * layers + 1, "linear": 2 * layers}.get(op, layers)
    calls *= train.tokens_per_step // (train.batch_size * train.block_size)
    if base_ms - ms <= SAVING * calls * alone_ms + SAVING_OF_STEP * base_ms:
        return None
    saved = f"a step takes {base_ms - ms:.3g} ms less"
    return f"{saved}, and all {calls} calls of the baseline's {op} take {calls * alone_ms:.3g} ms alone"


def impossible_alone(row: dict) -> str | None:
    """Return why the figures of the op alone cannot be true; None if they can."""
    if (row["both/floor_ms"] or 0) > LAUNCHES_MS and row["both/ms"] * TOO_GOOD < row["both/floor_ms"]:
        return (
            f"alone it takes {row['both/ms']:.3g} ms, and the work that it cannot avoid {row['both/floor_ms']:.3g} ms"
        )
    for key in ("error/out", "error/gradients"):
        if not row[key] <= 4 * row[f"{key}/eager"] + torch.finfo(torch.float32).eps * 64:
            errors = f"{row[key]:.2g}, eager's by {row[f'{key}/eager']:.2g}"
            what = "outputs" if key == "error/out" else "gradients"
            return f"the {what} of its timed calls are off by {errors}"
    return None


def read_training(words: list[str]) -> tuple[TrainConfig, Recipe]:
    """Return the config of train.py with these arguments, and its recipe."""
    composed = compose(TrainConfig, "config", words)
    complete_config(composed)
    cfg = parse(composed, TrainConfig)
    return cfg, Recipe.of(cfg)


def main_with_training() -> None:
    take_training()
    main()


if __name__ == "__main__":
    main_with_training()
