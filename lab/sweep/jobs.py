"""The jobs of a sweep: each is a command that a user could type, in a process and a folder of its own.

out/<sweep>/<n>-<what varies>/   the run's folder (runtime/run.py), and in it
                       log.txt   what the job printed

However a job ends, it leaves a row. The same sweep in the same folder continues: it runs each job that has no row, or
that a signal stopped.
"""

import contextlib
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

from common.files import open_regular
from common.terminal import override, printable, shell_command
from lab.old_rows import rename_gluon
from lab.sweep.table import has_failed, speed
from runtime.checkpoint import checkpoint_folders, read_manifest
from runtime.command import program
from runtime.config import UserError, check
from runtime.console import progress_bar
from runtime.folders import cache_variables, explain_unwritable
from runtime.row import KILLED, UNFINISHED, read_known_row, read_row, write_row
from runtime.signals import Signals, describe_exit

GRACE = 10.0  # seconds that a job has to end after a signal
LAST_BYTES = 2**16  # of log.txt, in which the last line is
INTERRUPTED = "stopped", "failed: KeyboardInterrupt"  # after a signal: with runtime.signals, and without
# keys of the sweep, not of its jobs
SWEEP_KEYS = {"out_dir", "sweep", "sweep.timeout", "sweep.repeats", "sweep.own_caches", "sweep.sort"}


class SweepJob:
    """One job: its folder, its overrides (`words`) and Hydra's flags. It runs on one of `gpus`.

    `caches` is a folder for the caches of torch.compile, Triton and FA4, which only the runs of this job share. Raises
    UserError if the job's folder has the row of another command, or a row that cannot be read.
    """

    def __init__(
        self, folder: Path, words: list[str], flags: list[str], gpus: list[str | None], caches: Path | None = None
    ):
        self.folder, self.words, self.flags, self.gpus, self.caches = folder, words, flags, gpus, caches
        self.died = False  # True after complete_row(), if the job could not write its status itself
        if row := read_known_row(folder, ": restore the file, or delete it to run the job again"):
            try:
                row_words = shlex.split(str(rename_gluon(row)[0].get("command")))
            except ValueError:
                row_words = []
            check(
                job_overrides(row_words) == job_overrides(words),
                f"{folder} has the row of another command; give this sweep an out_dir of its own",
            )

    @property
    def row(self) -> dict | None:
        return read_row(self.folder)

    @property
    def done(self) -> bool:
        return self.row is not None and not self.row["status"].startswith(INTERRUPTED)

    @property
    def log(self) -> str:
        """The path of the file with the job's output, relative to the working directory if it is below it."""
        path = (self.folder / "log.txt").absolute()
        return printable(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

    @property
    def has_failed(self) -> bool:
        return self.row is not None and has_failed(self.row)

    def start(self, gpu: str | None, lock: TextIO) -> None:
        """Start the process in a process group of its own. Ctrl-C then reaches only the sweep, which forwards it.

        The process inherits the `lock` of the sweep's folder, and so holds it even if the sweep is killed. Raises
        UserError if the job's folder cannot be written.
        """
        self.gpu, self.start_time, self.timeout_status = gpu, time.monotonic(), None
        words = [*program(), *self.flags, *self.words, override("out_dir", self.folder)]
        with explain_unwritable(self.folder):
            self.folder.mkdir(exist_ok=True)
            (self.folder / "result.json").unlink(missing_ok=True)
            if can_resume(self.folder):
                words.append("train.resume=auto")
            else:
                for name in ("config.yaml", "metrics.jsonl"):
                    (self.folder / name).unlink(missing_ok=True)
                shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
            log = open_regular(self.folder / "log.txt", "ab")
        self.command = shell_command("python", *words)
        with log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                pass_fds=[lock.fileno()],
                process_group=0,
            )

    def environment(self) -> dict[str, str]:
        variables = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        if self.gpu:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpu
        if self.caches:
            variables |= cache_variables(self.caches.resolve())
        return variables

    def poll(self, minutes: float | None) -> bool:
        """Return whether the job has ended. A job that has run for more than `minutes` is ended first."""
        if self.process.poll() is None and time.monotonic() - self.start_time > 60 * (minutes or math.inf):
            self.timeout_status = f"failed: more than {minutes:g} minutes"
            self.end(signal.SIGTERM)
        return self.process.poll() is not None

    def end(self, signal_number: int) -> None:
        """Send the signal, and kill the job if it runs on for GRACE seconds."""
        self.process.send_signal(signal_number)
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def complete_row(self) -> str:
        """Write the row of the ended job if the job wrote none or ran out of time. Return a line for the terminal.

        Raises UserError if the row cannot be written.
        """
        row = self.row or {"name": self.folder.name, "command": self.command, "status": KILLED}
        if row["status"].startswith((UNFINISHED, KILLED)) or (self.timeout_status and row["status"] != "ok"):
            self.died = row["status"].startswith((UNFINISHED, KILLED))
            row["status"] = self.timeout_status or self.failure()
            with explain_unwritable(self.folder):
                write_row(self.folder, row)
        seconds = int(time.monotonic() - self.start_time)
        figure = f"{speed(row):,.0f} tok/s" if speed(row) else row["status"]
        log = f"  {self.log}" if self.has_failed else ""
        return printable(f"{self.folder.name}  {figure}  {seconds // 60}:{seconds % 60:02}{log}")

    def failure(self) -> str:
        """Return the status of a job that wrote no row: its error, or how the process ended."""
        code = self.process.returncode
        if code < 0:
            return f"failed: {describe_exit(code)}"
        lines = []
        with contextlib.suppress(OSError), open_regular(self.folder / "log.txt") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        last = lines[-1] if lines else ""
        if last.startswith("error: "):
            return f"failed: {last.removeprefix('error: ')}"
        return f"failed: exit code {code}: {last}"


def can_resume(folder: Path) -> bool:
    """Return whether the folder has an unfinished run to resume. A run without checkpoints starts again.

    A run with proof=true also starts again, because a proof needs the first steps of a run. Its checkpoints record the
    config. If none can be read, the run resumes, and says why it cannot.
    """
    try:
        folders = checkpoint_folders(folder / "checkpoints")
    except UserError:
        return True
    for path in folders:
        with contextlib.suppress(UserError):
            return not read_manifest(path)["config"].get("proof")
    return (folder / "checkpoints").exists()


def job_overrides(words: list[str]) -> set[str]:
    """Return the overrides in a command, except out_dir=..., train.resume=auto and an empty prompt.

    scripts.generate adds `prompt=` to the command in its row, because without it a terminal asks for prompts.
    """
    overrides = {word for word in words if "=" in word and not word.startswith(("--", "out_dir=", "train.resume=auto"))}
    return overrides - {"prompt="}


def plan_jobs(
    folder: Path,
    jobs: list[list[str]],
    added: list[str],
    flags: list[str],
    gpus: list[str | None],
    repeats: int = 1,
    own_caches: bool | None = False,
) -> list[SweepJob]:
    """Return the jobs in the order in which they run, in folders named after what varies.

    Each job has its own overrides, followed by `added`. Every second repeat runs in reverse order (A B B A). A repeat
    of all jobs takes one GPU, because two GPUs may differ by more than two kernels do. With `own_caches`, a
    job has compile caches of its own on each GPU, which are empty in its first run. None means True with repeats.
    """
    for key in sorted(SWEEP_KEYS):
        values = {word for words in jobs for word in words if word.lstrip("+").startswith(f"{key}=")}
        check(len(values) < 2, f"{key} cannot vary in a sweep, because all of its jobs share it")
    jobs = [[word for word in words if word.lstrip("+").partition("=")[0] not in SWEEP_KEYS] for words in jobs]
    names = job_names(jobs)
    own_caches = repeats > 1 if own_caches is None else own_caches
    planned = []
    for repeat in range(repeats):
        repeat_jobs, gpu_number = [], repeat % len(gpus)
        job_gpus = [gpus[gpu_number]] if repeats > 1 else gpus
        for name, words in zip(names, jobs, strict=True):
            caches = folder / name / "caches" / str(gpu_number) if own_caches else None
            job_folder = folder / (f"{name}.{repeat + 1}" if repeat else name)
            repeat_jobs.append(SweepJob(job_folder, words + added, flags, job_gpus, caches))
        if repeat % 2:
            repeat_jobs.reverse()
        planned += repeat_jobs
    return planned


def job_names(jobs: list[list[str]]) -> list[str]:
    """Return a name for each job: a number, and the overrides that at most half of the jobs have.

    For example 1-kernels.eager-batch_size.8.
    """
    counts = Counter(word for words in jobs for word in words)
    names = []
    for number, words in enumerate(jobs, 1):
        varying = [word.lstrip("+~").partition("=") for word in words if 2 * counts[word] <= len(jobs)]
        name = "-".join(f"{key.rpartition('.')[2]}.{file_name(value)}" for key, _, value in varying) or "base"
        digits = len(str(len(jobs)))
        names.append(re.sub(r"[^\w.+-]+", "_", f"{number:0{digits}}-{name}")[:100])
    return names


def file_name(value: str) -> str:
    """Return the path of a Python file without its folders, except the last one; any other value as it is."""
    return "/".join(value.split("/")[-2:]) if value.endswith(".py") else value


def gpu_slots(device: str) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES for each job that may run at the same time; None leaves the variable as it is.

    torch.cuda.device_count() makes no CUDA context, which would take memory from the jobs.
    """
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if count < 2:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else list(map(str, range(count))))[:count]


def next_job(waiting: list[SweepJob], free: list[str | None]) -> tuple[SweepJob, str | None] | None:
    """Return the first job that may run on a free GPU, and that GPU; None if no job may."""
    for job in waiting:
        for gpu in free:
            if gpu in job.gpus:
                return job, gpu
    return None


def run_jobs(
    jobs: list[SweepJob], gpus: list[str | None], minutes: float | None, lock: TextIO, signals: Signals
) -> None:
    """Run every job that is not done, and print a line for each.

    After a signal no further job starts, and the running jobs get the signal too.
    """
    waiting, running, free = [job for job in jobs if not job.done], [], list(gpus)
    forwarded, done = None, len(jobs) - len(waiting)
    with progress_bar(len(jobs), done, unit="job") as bar:
        try:
            while running or (waiting and not signals.received):
                while not signals.received and (pair := next_job(waiting, free)):
                    job, gpu = pair
                    job.start(gpu, lock)
                    waiting.remove(job)
                    free.remove(gpu)
                    running.append(job)
                bar.set_description(", ".join(job.folder.name for job in running))
                time.sleep(0.1)
                if signals.received != forwarded:
                    forwarded = signals.received
                    bar.write(f"{forwarded}: waiting for the running jobs to end after their step")
                    for job in running:
                        job.process.send_signal(signal.Signals[forwarded])
                for job in [job for job in running if job.poll(minutes)]:
                    running.remove(job)
                    free.append(job.gpu)
                    if job.row or not signals.received:  # a job that a signal ended before its first step gets no row
                        line = job.complete_row()
                        done += job.done
                        bar.update(job.done)
                        bar.write(f"[{done}/{len(jobs)}] {line}")
                sys.stdout.flush()
        finally:  # after a second Ctrl-C
            for job in running:
                job.end(signal.SIGINT)
