"""Jobs of a sweep: each a command that a user could type, in a process and a folder of its own.

out/<sweep>/<n>-<what varies>/   the run's folder (runtime/run.py), and in it
                       log.txt   what the job said

However a job ends it leaves a row. The same sweep in the same folder goes on: a job is run again only where it has no
row, or one that says `stopped`.
"""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TextIO

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from runtime.config import check, quoted
from runtime.console import speed
from runtime.run import read_row, write_row
from runtime.signals import Signals

GRACE = 10.0  # seconds that a job has to end by itself
SWEEPS = {"out_dir", "sweep", "sweep.timeout", "sweep.repeats"}  # keys that are the sweep's and not its jobs'


class Job:
    """One job: its folder, its overrides (`words`), Hydra's flags, and the GPUs of which it takes one. UserError: the
    folder has another one's row.

    With a folder of `caches` torch.compile and Triton find there what earlier runs of the job left, and nothing else.
    """

    def __init__(
        self, folder: Path, words: list[str], flags: list[str], gpus: list[str | None], caches: Path | None = None
    ):
        self.folder, self.words, self.flags, self.gpus, self.caches = folder, words, flags, gpus, caches
        ran = shlex.split(self.row["command"]) if self.row else words
        check(own(ran) == own(words), f"{folder} has the row of another command; give this sweep an out_dir of its own")

    @property
    def row(self) -> dict | None:
        return read_row(self.folder)

    @property
    def done(self) -> bool:
        return self.row is not None and not self.row["status"].startswith("stopped")

    def start(self, gpu: str | None, lock: TextIO) -> None:
        """In a process group of its own: Ctrl-C comes to the sweep alone, which passes it on. Should the sweep be
        killed, the job holds the folder's `lock` to its end."""
        self.gpu, self.began, self.late = gpu, time.monotonic(), None
        self.folder.mkdir(exist_ok=True)
        (self.folder / "result.json").unlink(missing_ok=True)
        if unproved(self.folder):
            for name in ("config.yaml", "metrics.jsonl"):
                (self.folder / name).unlink(missing_ok=True)
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        words = [*self.flags, *self.words, f"out_dir={quoted(str(self.folder))}"]
        words += ["train.resume=auto"] * (self.folder / "config.yaml").exists()  # it was stopped, or killed
        self.command = shlex.join(["python", sys.argv[0], *words])
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        for name in ("TORCHINDUCTOR", "TRITON") if self.caches else ():
            environment[f"{name}_CACHE_DIR"] = str(self.caches.resolve() / name.lower())
        with (self.folder / "log.txt").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, sys.argv[0], *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[lock.fileno()],
                process_group=0,
            )

    def over(self, minutes: float | None) -> bool:
        """Whether the job has ended, by itself or because it took too long."""
        if self.process.poll() is None and time.monotonic() - self.began > 60 * (minutes or math.inf):
            self.late = f"failed: more than {minutes:g} minutes"
            self.end(signal.SIGTERM)
        return self.process.poll() is not None

    def end(self, number: int) -> None:
        """Ask it to end, then insist."""
        self.process.send_signal(number)
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def settle(self) -> str:
        """See to it that the row of a job that has ended says how. Returns a line for the user."""
        row = self.row or {"name": self.folder.name, "command": self.command, "status": None}
        if row["status"] is None or (self.late and row["status"] != "ok"):
            row["status"] = self.late or self.why()
            write_row(self.folder, row)
        seconds = int(time.monotonic() - self.began)
        figure = f"{speed(row):,.0f} tok/s" if speed(row) else row["status"]
        return f"{self.folder.name}  {figure}  {seconds // 60}:{seconds % 60:02}"

    def why(self) -> str:
        """The status of a job that left no row: its error, or how it ended."""
        code = self.process.returncode
        if code < 0:
            return f"failed: exit code {code} ({signal.strsignal(-code)})"
        last = ["", *(self.folder / "log.txt").read_text(errors="replace").splitlines()][-1]
        error = last.removeprefix("error: ")
        return f"failed: {error}" if error != last else f"failed: exit code {code}: {last}"


def unproved(folder: Path) -> bool:
    """Whether the folder has a run with proof=true that was cut short: its proof is of its first steps, so it begins
    anew."""
    path = folder / "config.yaml"
    return path.exists() and bool((OmegaConf.load(path) or {}).get("proof"))


def own(words: list[str]) -> set[str]:
    """Of a command, the overrides that make the job what it is."""
    return {word for word in words if "=" in word and not word.startswith(("out_dir=", "train.resume=auto"))}


def planned(
    folder: Path, jobs: list[list[str]], added: list[str], flags: list[str], gpus: list[str | None], repeats: int = 1
) -> list[Job]:
    """The jobs with these overrides and those in `added`, in folders named after what sets them apart from most.

    Repeats go there and back (A B B A), each turn of all jobs on one GPU, as two may differ by more than two kernels.
    A job then has compile caches of its own on each GPU: empty ones in its first run.
    """
    for key in sorted(SWEEPS):
        values = {word for words in jobs for word in words if word.lstrip("+").startswith(f"{key}=")}
        check(len(values) < 2, f"{key} cannot vary in a sweep: it is that of all of its jobs")
    jobs = [[word for word in words if word.lstrip("+").partition("=")[0] not in SWEEPS] for words in jobs]
    held = Counter(word for words in jobs for word in words)
    rounds = [[] for _ in range(repeats)]
    for number, words in enumerate(jobs, 1):
        # kernels=eager train.batch_size=8 -> kernels.eager-batch_size.8
        rare = [word.lstrip("+~").partition("=") for word in words if 2 * held[word] <= len(jobs)]
        name = "-".join(f"{key.rpartition('.')[2]}.{value}" for key, _, value in rare) or "base"
        name = re.sub(r"[^\w.+-]+", "_", f"{number:0{len(str(len(jobs)))}}-{name}")[:100]
        for turn, those in enumerate(rounds):
            where, caches = gpus, None
            if repeats > 1:
                lane = turn % len(gpus)
                where, caches = [gpus[lane]], folder / name / "caches" / str(lane)
            those.append(Job(folder / (f"{name}.{turn + 1}" if turn else name), words + added, flags, where, caches))
    return [job for turn, those in enumerate(rounds) for job in (reversed(those) if turn % 2 else those)]


def slots(device: str) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of the jobs that may run at a time; None leaves it as it is.

    The driver counts the GPUs: a CUDA context of this process would take memory from its jobs.
    """
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if count < 2:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else list(map(str, range(count))))[:count]


def fit(waiting: list[Job], free: list[str | None]) -> tuple[Job, str | None] | None:
    """The first job that may run on a free GPU, and that GPU."""
    return next(((job, gpu) for job in waiting for gpu in free if gpu in job.gpus), None)


def work(jobs: list[Job], gpus: list[str | None], minutes: float | None, lock: TextIO, signals: Signals) -> None:
    """Run what is not done, a line each. After a signal none is begun, and those that run are passed it on."""
    waiting, running, free = [job for job in jobs if not job.done], [], list(gpus)
    passed, done = None, len(jobs) - len(waiting)
    terminal = {"disable": not sys.stdout.isatty(), "leave": False, "file": sys.stdout}
    with tqdm(total=len(jobs), initial=done, unit="job", **terminal) as bar:
        try:
            while running or (waiting and not signals.received):
                while not signals.received and (pair := fit(waiting, free)):
                    job, gpu = pair
                    job.start(gpu, lock)
                    waiting.remove(job)
                    free.remove(gpu)
                    running.append(job)
                bar.set_description(", ".join(job.folder.name for job in running))
                time.sleep(0.1)
                if signals.received != passed:
                    passed = signals.received
                    bar.write(f"{passed}: waiting for what runs to end after its step", file=sys.stdout)
                    for job in running:
                        job.process.send_signal(signal.Signals[passed])
                for job in [job for job in running if job.over(minutes)]:
                    running.remove(job)
                    free.append(job.gpu)
                    if job.row or not signals.received:  # else it had not begun, and will be run again
                        told = job.settle()
                        done += job.done
                        bar.update(job.done)
                        bar.write(f"[{done}/{len(jobs)}] {told}", file=sys.stdout)
                sys.stdout.flush()
        finally:  # a second Ctrl-C
            for job in running:
                job.end(signal.SIGINT)
