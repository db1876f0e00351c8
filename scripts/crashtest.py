"""Disturb training runs at random, and resume them: `python -m scripts.crashtest runs=20 -- kernels=triton`.

Every run must end with the losses of an undisturbed run. lab/crashtest/ has the faults and the judgement. A run is a
fork of this process, which has imported all modules, but computes nothing itself. That saves 8 s of imports a run.
"""

if __name__ == "__main__":  # before the other imports, which take 8 s
    from lab.crashtest.inject import preload

    preload()

import ctypes
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch._dynamo  # noqa: F401 (otherwise torch.optim imports it in each run)
from hydra.core.global_hydra import GlobalHydra

import train
from common.files import open_regular
from common.terminal import override
from lab.commands import command, take_training
from lab.crashtest import inject, tracker
from lab.crashtest.faults import DAMAGES, KILL, KINDS, MUTE, NO_FAULT, SMALL, TRACKERS, Fault, draw_faults
from lab.crashtest.judge import Disturbed, End, Hang, Undisturbed, table
from runtime.command import config_flags
from runtime.config import UserError, check
from runtime.folders import make_folder
from runtime.row import read_row

Fork = multiprocessing.get_context("fork").Process
TEXT = "All work and no play makes Jack a dull boy.\n" * 400
# A run hangs if it takes longer than these seconds and ten times an undisturbed run. It gives a stopped tracker 80 s
SLOWEST = 150.0
TRACKER_SECONDS = 2.0  # how much longer a run with a tracker takes, while W&B starts


@dataclass
class Config:
    runs: int
    seed: int
    kinds: list[str]
    training: list[str]
    out_dir: str | None

    def __post_init__(self):
        check(self.runs >= 1, f"runs={self.runs}: it must be at least 1")
        for kind in self.kinds:
            check(kind in KINDS, f"kinds: there is no {kind!r}; choose {', '.join(KINDS)}")


@command(Config, "crashtest")
def main(cfg: Config) -> None:
    folder, rng = make_folder(cfg.out_dir, "crashtest").absolute(), random.Random(cfg.seed)
    check(not (folder / "undisturbed").exists(), f"out_dir={folder} already holds a crashtest; choose another folder")
    trainer = Trainer(folder, cfg.training)
    survived, lost, chosen, kinds, kept = Counter(), Counter(), cfg.kinds or KINDS, [], []
    for number in range(1, cfg.runs + 1):
        kinds = kinds or rng.sample(chosen, len(chosen))
        run = Disturbed(folder / f"{number:03d}", trainer.expected)
        problem = disturb(trainer, run, draw_faults(rng, kinds.pop(), chosen))
        (lost if problem else survived).update(kind for kind, _ in run.events)
        events = " | ".join(done for _, done in run.events) or "every fault came after the end"
        print(f"{run.folder.name:<8} {events} | {f'lost: {problem}' if problem else 'bit-equal'}", flush=True)
        if problem:
            kept.append(run.folder.name)
        else:
            shutil.rmtree(run.folder)
    print(f"\n{table(survived, lost)}\n", flush=True)
    check(not kept, f"{len(kept)} of {cfg.runs} runs were lost: see {', '.join(kept)} in {folder}")
    print(f"done     {cfg.runs} runs, {survived.total()} faults, seed={cfg.seed}: nothing was lost")


def disturb(trainer: "Trainer", run: Disturbed, faults: list[Fault]) -> str | None:
    """Let the faults happen, and then complete the run. Return what was lost, or None."""
    try:
        for fault in faults:
            before = run.valid_steps()
            end, done = trainer.train(run.folder, fault)
            if done and fault.kind not in DAMAGES:
                run.events.append((fault.kind, done))
            problem = run.find_fault(fault.kind, end, before)
            if problem or (fault.kind in DAMAGES and (problem := damage(trainer, run, fault))):
                return problem
        before = run.valid_steps()
        end, _ = trainer.train(run.folder)
        return run.find_fault(NO_FAULT.kind, end, before) or run.find_loss()
    except (Hang, UserError, OSError) as error:  # of a function that reads what the run has left
        return str(error)


def damage(trainer: "Trainer", run: Disturbed, fault: Fault) -> str | None:
    """Damage a file, and resume. If the run refuses or ignores the file, bring it back. Return what was lost."""
    damage, problem = run.damage(fault)
    if damage.done is None:
        return None
    run.events.append((fault.kind, damage.done))
    before = run.valid_steps()
    end, _ = trainer.train(run.folder)
    problem = problem or run.find_fault(fault.kind, end, before, damage)
    if end.code or damage.stays:
        damage.undo()
    return problem


class Trainer:
    """Runs train.py in forks of this process. It first trains twice without a fault, to know what must come out."""

    def __init__(self, folder: Path, training: list[str]):
        self.words = [*SMALL, *training, "train.resume=auto"]
        if not any(word.startswith("data") for word in training):
            (folder / "text.txt").write_text(TEXT, encoding="utf-8")
            self.words += ["data=text", "data.tokenizer=bytes", override("data.path", folder / "text.txt")]
        self.seconds, self.own_data = 600.0, False
        self.counts = self.operations = inject.shared_counts()
        # Every run prepares its own data, unless that takes long: then no fault touches the user's data
        self.own_data = self._train_undisturbed(folder / "undisturbed")["data"]["prepare"] == "auto"
        start = time.perf_counter()
        settings = self._train_undisturbed(folder / "again")["train"]
        self.seconds, self.operations = time.perf_counter() - start, list(self.counts)
        self.expected = Undisturbed(folder / "again")
        check(
            Undisturbed(folder / "undisturbed").figures == self.expected.figures,
            f"two undisturbed runs, {folder / 'undisturbed'} and {folder / 'again'}, differ: choose deterministic "
            "kernels, such as kernels=eager attn=eager",
        )
        every, last = settings["checkpoint_every"], settings["max_steps"] or 0
        enough = every > 0 and last // every >= 3
        check(enough, "a run needs three checkpoints: lower train.checkpoint_every or raise train.max_steps")
        print(f"whole    {last} steps in {self.seconds:.1f} s, twice with the same bits", flush=True)

    def _train_undisturbed(self, folder: Path) -> dict:
        """Train in `folder`/run, and return the config of the row."""
        end, _ = self.train(folder)
        check(end.code == 0, f"the undisturbed run failed: {end.last_line}")
        return read_row(folder / "run")["config"]

    def train(self, folder: Path, fault: Fault = NO_FAULT) -> tuple[End, str | None]:
        """Train in `folder`/run, or resume there. Return how that ended, and what happened; None if nothing did.

        Before a damage, the process is killed.
        """
        place = fault.place(inject.count(self.operations, fault.operations), is_new=not folder.exists())
        folder.mkdir(exist_ok=True)
        log = folder / "log.txt"
        start = log.stat().st_size if log.exists() else 0
        words = [*self.words, override("out_dir", folder / "run")]
        words += [override("data.cache", folder / "data")] if self.own_data else []
        words += ["logger=wandb"] if fault.kind in TRACKERS else []
        ctypes.memset(self.counts, 0, ctypes.sizeof(self.counts))
        with tracker.mute_server() if fault.kind == MUTE else nullcontext({}) as environment:
            words += ["logger.mode=online"] if environment else []
            code, is_disturbed = self._wait(
                Fork(target=self._run_child, args=(log, words, environment, fault, place)), fault
            )
        with open_regular(log) as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
        is_disturbed |= self.counts[0] > place >= 0
        return End(code, text), fault.describe(place) if is_disturbed else None

    def _wait(self, process: Fork, fault: Fault) -> tuple[int | None, bool]:
        """Return (the exit code, whether a kill or a fault of the tracker happened). None is the code of a hang."""
        process.start()
        moment, longest, is_signalled, left = self.seconds * fault.share(), SLOWEST + 10 * self.seconds, False, []
        try:
            if number := TRACKERS.get(fault.kind):
                moment += TRACKER_SECONDS * fault.share()
                is_signalled = tracker.signal_tracker(process.pid, number, moment, longest)
                left = tracker.open_all(tracker.children_of(process.pid))  # a stopped one would live on
            process.join(moment if fault.kind == KILL else longest)
            was_alive = process.is_alive()
        finally:
            left += tracker.open_all(tracker.children_of(process.pid))
            process.kill()
            process.join()
            tracker.send(left, signal.SIGKILL)
        if was_alive:
            return (process.exitcode, True) if fault.kind == KILL else (None, True)
        return process.exitcode, is_signalled or fault.kind == MUTE

    def _run_child(self, log: Path, words: list[str], environment: dict[str, str], fault: Fault, place: int) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open_regular(log, "a") as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
        os.environ |= environment
        sys.argv = ["train.py", *config_flags, *words]
        sys.modules["__main__"] = train  # the row's command is then `python train.py ...`
        GlobalHydra.instance().clear()
        inject.arm(log.parent, fault.operations, place, fault.error, fault.is_forever(), self.counts)
        train.main()


if __name__ == "__main__":
    take_training()
    main()
