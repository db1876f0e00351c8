"""Settle a claim: `python -m scripts.judge op=norm impl=mine against=triton`.

Is the backend right, in every case of its contract? Does training with it run faster than with the other backend? What
does it change in memory and losses? The answer is one page, and the exit code.
"""

import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from common.files import write_atomically
from common.terminal import override, printable, shell_command
from kernels.registry import load
from lab.commands import command, compose, take_training
from lab.judge.claim import (
    EXIT_CODES,
    Claim,
    benchmark_op,
    check_claim,
    choose_backends,
    ignored_settings,
    probe_cases,
    read_training,
    training_words,
    undecided_answers,
    wrong_answers,
)
from lab.judge.verdict import judge_claim, page, speed_figure
from lab.recipe import Recipe
from lab.rows import track_rows, write_rows
from runtime.command import command_line, config_flags
from runtime.config import UserError, check, parse
from runtime.device import OutOfMemory, environment, explain_out_of_memory, select_device
from runtime.folders import make_folder
from runtime.signals import STOPPED, Signals, Stopped
from runtime.trackers import LoggerConfig, Tracker
from train import Config as TrainConfig
from train import complete_config

ROOT = Path(__file__).resolve().parent.parent


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


@command(Config, "judge")
def main(cfg: Config) -> None:
    tracker = Tracker(cfg.logger)
    folder = make_folder(cfg.out_dir, f"judge-{cfg.op}")
    try:
        with Signals():  # the probes and the training run in other processes, which end with this block
            claim = Claim(cfg.op, cfg.impl, cfg.against)
            row = settle(claim, cfg.training, cfg.repeats, cfg.rounds, cfg.limit, cfg.device, folder)
    except Stopped:
        again = judge_command(cfg.training, override("out_dir", folder))
        print(printable(f"stopped  before the verdict; continue with: {again}"))
        raise
    files = write_rows([row], "judge.jsonl", folder, cfg.keep)
    write_atomically(folder / "judge.md", page(row).encode())
    files.append(folder / "judge.md")
    if "ratio" in row and find_spec("matplotlib"):
        files.append(speed_figure(row, folder / "judge.png"))
    print(printable(f"\n{page(row)}\ndone     {', '.join(map(str, files))}"), flush=True)
    track_rows(tracker, f"judge-{cfg.op}", cfg, {f"{cfg.op}/{cfg.impl}": row}, folder)
    if row["verdict"] not in EXIT_CODES:
        raise UserError(f"no verdict: {row['reason']}")
    sys.exit(EXIT_CODES[row["verdict"]])


def judge_command(training: list[str], *added: str) -> str:
    """Return the shell command that judges this claim again."""
    words = [word for word in shlex.split(command_line()) if not word.startswith(("out_dir=", "training="))]
    return shell_command(*words, *added, *(["--", *training] if training else []))


def settle(
    claim: Claim, training: list[str], repeats: int, rounds: int, limit: float, device_name: str, folder: Path
) -> dict:
    """Test the backend, train with both backends in `folder`, measure the op alone. Return the row of the verdict."""
    device, chosen = select_device(device_name), f"{claim.op}={claim.impl}"
    load(claim.op, claim.backends[0], device)  # raises Unavailable here, before a minute of probes
    words = training_words(claim, device, training)
    recipe, shape = read_recipe([*words, choose_backends(claim, claim.impl)])
    about = {"command": judge_command(training), "env": environment(device)}
    print(printable(f"judge    {claim}, on {about['env']['device']}"), flush=True)
    for line in ignored_settings(claim.op, recipe):
        print(f"note     {line}", flush=True)
    statuses = probe_cases(claim, recipe, shape[1], device, limit)
    check(
        not all(status.startswith("unavailable") for status in statuses.values()),
        f"{chosen} runs no case here: {next(iter(statuses.values()))}",
    )
    in_training = statuses[f"{recipe.precision} training"]
    check(not in_training.startswith("unavailable"), f"{chosen} cannot run this training: {in_training}")
    runs, benchmark = {}, []
    if not wrong_answers(statuses) and not undecided_answers(statuses):
        print(f"right    in {sum(status.startswith('ok') for status in statuses.values())} cases", flush=True)
        # shared caches save compilation, and the verdict leaves out the first steps, which compile
        sweep = ["-m", f"sweep.repeats={repeats}", "sweep.own_caches=false"]
        train([*sweep, *words, choose_backends(claim, *claim.backends)], folder)
        runs = read_training(claim, folder)
        check(all(runs.values()), f"the training left no rows of both backends in {folder}: its messages are above")
        try:
            with explain_out_of_memory(f"{claim.op} alone", "train.batch_size, after `--`"):
                benchmark = benchmark_op(claim, recipe, shape, rounds, device)
        except OutOfMemory as reason:  # the training has decided the verdict
            print(f"note     no figures of {claim.op} alone: {reason}", flush=True)
    return {**judge_claim(claim, statuses, runs, benchmark), "date": time.strftime("%Y-%m-%d"), **about}


def read_recipe(words: list[str]) -> tuple[Recipe, tuple[int, int]]:
    """Return the recipe and the (B, T) of a micro-step, of train.py with these arguments."""
    composed = compose(TrainConfig, "config", words)
    complete_config(composed)
    cfg = parse(composed, TrainConfig)
    recipe = Recipe(
        model=cfg.model,
        kernels=cfg.kernels,
        attn=cfg.attn,
        optim=cfg.optim,
        precision=cfg.precision,
        seed=cfg.seed,
        documents=cfg.data.mask_documents,
    )
    return recipe, (cfg.train.batch_size, cfg.train.block_size)


def train(words: list[str], folder: Path) -> None:
    """Run train.py, which prints its progress. Raises Stopped if a signal arrives, after train.py has ended.

    After the first signal, the sweep ends its runs after their step. After the second signal, it ends them at once.
    """
    program = [sys.executable, str(ROOT / "train.py"), *config_flags, *words, override("out_dir", folder)]
    child = subprocess.Popen(program, stdin=subprocess.DEVNULL, process_group=0)  # Ctrl-C reaches this process only
    stopped = None
    try:
        while child.returncode is None:
            try:
                child.wait()
            except Stopped as signal_received:
                stopped = signal_received
                child.send_signal(signal.SIGINT)
    finally:
        if child.poll() is None:  # another signal came while one was forwarded
            child.terminate()
    if child.returncode == STOPPED:
        raise Stopped(STOPPED, "the training was stopped")
    if stopped:
        raise stopped


def main_with_training() -> None:
    take_training()
    main()


if __name__ == "__main__":
    main_with_training()
