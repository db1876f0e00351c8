"""Kill and damage training runs at random, and resume them: `python -m scripts.crashtest runs=20 -- kernels=triton`.

Every run must end with the losses of an undisturbed run. lab/crashtest.py has the faults and the judgement. A run is a
fork of this process, which has imported all modules, but computes nothing itself. That saves 8 s of imports a run.
"""

import multiprocessing
import os
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch._dynamo  # noqa: F401 (otherwise torch.optim imports it in each run)
from hydra.core.global_hydra import GlobalHydra

import train
from lab.commands import command, take_training
from lab.crashtest import DAMAGES, KILL, KINDS, SMALL, Disturbed, Fault, arm, draw_faults, read_figures, table
from runtime.checkpoint import checkpoint_folders
from runtime.command import config_flags
from runtime.config import check
from runtime.folders import make_folder
from runtime.run import read_row
from terminal import override


@dataclass
class Config:
    runs: int
    seed: int
    training: list[str]
    out_dir: str | None

    def __post_init__(self):
        check(self.runs >= 1, f"runs={self.runs}: it must be at least 1")


@command(Config, "crashtest")
def main(cfg: Config) -> None:
    folder, rng = make_folder(cfg.out_dir, "crashtest"), random.Random(cfg.seed)
    words = [*SMALL, *cfg.training, "train.resume=auto"]
    whole = folder / "undisturbed"
    check(not whole.exists(), f"out_dir={folder} already holds a crashtest; choose another folder")
    train_undisturbed(words, whole)
    start = time.perf_counter()
    train_undisturbed(words, folder / "again")
    seconds, expected = time.perf_counter() - start, read_figures(whole)
    check(
        read_figures(folder / "again") == expected,
        f"two undisturbed runs, {whole} and {folder / 'again'}, differ: choose deterministic kernels, such as "
        "kernels=eager attn=eager",
    )
    settings = read_row(whole)["config"]["train"]
    every, last = settings["checkpoint_every"], settings["max_steps"] or 0
    saves = list(range(every, last + 1, every)) if every else []
    check(len(saves) >= 3, "a run needs three checkpoints: lower train.checkpoint_every or raise train.max_steps")
    largest = max(path.stat().st_size for path in checkpoint_folders(whole / "checkpoints")[0].rglob("*"))
    print(f"whole    {len(expected)} steps in {seconds:.1f} s, twice with the same bits", flush=True)
    survived, lost, kinds, kept = Counter(), Counter(), [], []
    for number in range(1, cfg.runs + 1):
        kinds = kinds or rng.sample(KINDS, len(KINDS))
        run, happened, events = Disturbed(folder / f"{number:03d}", expected), [], []
        for fault in draw_faults(rng, kinds.pop(), saves):
            code = train_in_fork(words, run.folder, fault, largest, seconds)
            done = run.damage(fault) if fault.kind in DAMAGES else str(fault) if code else None
            if done:
                happened.append(fault.kind)
                events.append(done)
        code = train_in_fork(words, run.folder)
        problem = last_line(run.folder) if code else run.find_loss()
        (lost if problem else survived).update(happened)
        result = f"lost: {problem}" if problem else "bit-equal"
        print(f"{run.folder.name:<8} {' | '.join(events) or 'every fault came after the end'} | {result}", flush=True)
        if problem:
            kept.append(run.folder.name)
        else:
            shutil.rmtree(run.folder)
    print(f"\n{table(survived, lost)}\n", flush=True)
    check(not kept, f"{len(kept)} of {cfg.runs} runs were lost: see {', '.join(kept)} in {folder}")
    print(f"done     {cfg.runs} runs, {survived.total()} faults, seed={cfg.seed}: nothing was lost")


def train_undisturbed(words: list[str], folder: Path) -> None:
    code = train_in_fork(words, folder)
    check(not code, f"the undisturbed run failed: {last_line(folder) if code else ''}")


def last_line(folder: Path) -> str:
    """Return the last line that the run printed, without `error: `."""
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines() or ["it printed nothing"]
    return lines[-1].removeprefix("error: ")


def train_in_fork(
    words: list[str], folder: Path, fault: Fault | None = None, largest: int = 0, seconds: float = 0.0
) -> int:
    """Run train.py with these arguments in a fork, and return its exit code; -9 after a SIGKILL.

    A fault of kind KILL happens within `seconds`. `largest` is arm()'s.
    """
    folder.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=run_child, args=(words, folder, fault, largest))
    process.start()
    try:
        process.join(seconds * fault.share() if fault and fault.kind == KILL else None)
    finally:
        process.kill()
        process.join()
    return process.exitcode


def run_child(words: list[str], folder: Path, fault: Fault | None, largest: int) -> None:
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    sys.argv = ["train.py", *config_flags, *words, override("out_dir", folder)]
    sys.modules["__main__"] = train  # the row's command is then `python train.py ...`
    GlobalHydra.instance().clear()
    if fault:
        arm(fault, folder, largest)
    train.main()


if __name__ == "__main__":
    take_training()
    main()
