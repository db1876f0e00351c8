"""Run train.py in forks of this process, and disturb them."""

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch._dynamo  # noqa: F401 (otherwise torch.optim imports it in each run)

import train
from common.files import open_regular
from common.terminal import override
from runtime.config import check
from runtime.row import read_row
from tests.crashtest import inject, tracker
from tests.crashtest.faults import KILL, MUTE, NO_FAULT, SMALL, TRACKERS, Fault
from tests.crashtest.judge import End, Undisturbed

Fork = multiprocessing.get_context("fork").Process
TEXT = "All work and no play makes Jack a dull boy.\n" * 400
# A run hangs if it takes longer than these seconds and ten times an undisturbed run. It gives a stopped tracker 80 s
SLOWEST = 150.0
TRACKER_SECONDS = 2.0  # how much longer a run with a tracker takes, while W&B starts


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
            run = Fork(target=self._run_child, args=(log, words, environment, fault, place))
            code, is_disturbed = self._wait(run, fault)
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
        sys.argv = ["train.py", *words]
        sys.modules["__main__"] = train  # the row's command is then `python train.py ...`
        inject.arm(log.parent, fault.operations, place, fault.error, fault.is_forever(), self.counts)
        train.main()
