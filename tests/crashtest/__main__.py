"""Does a run go on after kills, errors, damaged files and dead trackers, and with the same losses?

    python -m tests.crashtest --runs 20                          a tiny run with the default config
    python -m tests.crashtest -- kernels=triton attn=triton      with your config; it must be deterministic
    python -m tests.crashtest --seed 7 --runs 100                other faults, and more
    python -m tests.crashtest --kinds kill "full log" --         of these kinds only

A tiny model trains twice without disturbance. Then each run is disturbed once or twice, at random, and resumed with
train.resume=auto:

    kill                SIGKILL at any time, or at the n-th operation on a file of the run or its data
    ENOSPC, EIO, EMFILE, EACCES, EINTR
                        the n-th operation fails with this error, alone or with all later ones
    full log            what the run prints can no longer be written
    flip, cut           after a kill, one bit of a file is flipped, or the file is cut: in the newest checkpoint,
                        another file of the run, or its data
    in place of a file  after a kill, a FIFO, a folder or a link takes the place of a file
    tracker             W&B's processes are killed or stopped, or its server answers nothing after the start

A run survives if no process of it hangs or ends with a traceback. After an injected error, or a damage outside of a
checkpoint, it may end with one line of error, and goes on once the cause is gone. At its end its losses, gradient norms
and validation losses are bit-equal with the undisturbed run's. The row is `ok` and has the same keys, no good
checkpoint was lost, and no temporary file is left. A damaged line of metrics.jsonl may be missing. The folder of a lost
run stays, with `log.txt`. The exit code is 1 if a run is lost. The same seed draws the same faults; only kills at a
random time and the trackers' faults depend on the speed of the machine.

The errors come from a preloaded library, faults.c, which the compiler cc makes. A run is a fork of this process, which
has imported all modules, but computes nothing itself: 1.4 s on a core instead of 9.
"""

if __name__ == "__main__":  # before the other imports, which take 8 s
    from tests.crashtest.inject import preload

    preload()

import argparse
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

from runtime.config import UserError, check
from runtime.folders import make_folder
from tests.crashtest.faults import DAMAGES, KINDS, NO_FAULT, Fault, draw_faults
from tests.crashtest.judge import Disturbed, Hang, table
from tests.crashtest.trainer import Trainer


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.crashtest", description=__doc__, formatter_class=formatter)
    parser.add_argument("--runs", type=int, default=20, help="runs to disturb")
    parser.add_argument("--seed", type=int, default=0, help="of the faults: another seed draws others")
    kinds = f"of faults; default: all of {', '.join(KINDS)}"
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=kinds)
    parser.add_argument("--out_dir", help="the folder of the runs; default: a new folder out/<time>-crashtest")
    parser.add_argument("training", nargs="*", help="more arguments of train.py, after --")
    return parser.parse_args(words)


def main() -> None:
    arguments = parse_arguments()
    folder = make_folder(arguments.out_dir, "crashtest").absolute()
    try:
        crashtest(folder, arguments.runs, arguments.seed, arguments.kinds, arguments.training)
    except UserError as error:
        sys.exit(f"error: {error}")


def crashtest(folder: Path, runs: int, seed: int, chosen: list[str], training: list[str]) -> None:
    """Disturb the runs, and print a line for each and a table. Raises UserError if a run was lost."""
    check(not (folder / "undisturbed").exists(), f"{folder} already holds a crashtest; choose another folder")
    trainer, rng = Trainer(folder, training), random.Random(seed)
    survived, lost, lost_runs, kinds = Counter(), Counter(), [], []
    for number in range(1, runs + 1):
        kinds = kinds or rng.sample(chosen, len(chosen))
        run = Disturbed(folder / f"{number:03d}", trainer.expected)
        problem = disturb(trainer, run, draw_faults(rng, kinds.pop(), chosen))
        (lost if problem else survived).update(kind for kind, _ in run.events)
        events = " | ".join(text for _, text in run.events) or "every fault came after the end"
        print(f"{run.folder.name:<8} {events} | {f'lost: {problem}' if problem else 'bit-equal'}", flush=True)
        if problem:
            lost_runs.append(run.folder.name)
        else:
            shutil.rmtree(run.folder)
    print(f"\n{table(survived, lost)}\n", flush=True)
    check(not lost_runs, f"{len(lost_runs)} of {runs} runs were lost: see {', '.join(lost_runs)} in {folder}")
    print(f"done     {runs} runs, {survived.total()} faults, seed={seed}: nothing was lost")


def disturb(trainer: Trainer, run: Disturbed, faults: list[Fault]) -> str | None:
    """Let the faults happen, and then complete the run. Return what was lost, or None."""
    try:
        for fault in faults:
            before = run.valid_steps()
            end, event = trainer.train(run.folder, fault)
            if event and fault.kind not in DAMAGES:
                run.events.append((fault.kind, event))
            problem = run.check_end(fault.kind, end, before)
            if not problem and fault.kind in DAMAGES:
                problem = damage(trainer, run, fault)
            if problem:
                return problem
        before = run.valid_steps()
        end, _ = trainer.train(run.folder)
        return run.check_end(NO_FAULT.kind, end, before) or run.find_difference()
    except (Hang, UserError, OSError) as error:  # of a function that reads what the run has left
        return str(error)


def damage(trainer: Trainer, run: Disturbed, fault: Fault) -> str | None:
    """Damage a file, and resume. If the run refuses or ignores the file, bring it back. Return what was lost."""
    damage, problem = run.damage(fault)
    if damage.description is None:
        return None
    run.events.append((fault.kind, damage.description))
    before = run.valid_steps()
    end, _ = trainer.train(run.folder)
    problem = problem or run.check_end(fault.kind, end, before, damage)
    if end.code or damage.stays:
        damage.undo()
    return problem


if __name__ == "__main__":
    main()
