"""Experiment trackers. They receive the figures of metrics.jsonl and the result row.

A run's own files are complete without a tracker, and a tracker never ends or stops a run. So its library runs in a
process of its own (runtime/tracker_process.py), which gets each call as a line of JSON and answers it. The run waits
for the answers only at its end. If one does not come in time, the process and all that it has started are killed.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from common.files import last_line
from common.terminal import printable, warn
from runtime.command import program
from runtime.config import check
from runtime.signals import Signals, describe_exit
from runtime.tracker_process import LIBRARIES, MAX_CHARACTERS, explain

ROOT = Path(__file__).resolve().parents[1]
INIT_SECONDS = 10  # if W&B has not answered after this time, the run continues offline
FINISH_SECONDS = 60  # how long the end of a run waits for W&B's upload
GRACE = 10  # how long it then waits for the process to say that the upload took longer
IMPORT_SECONDS = 60  # how long the import of a library may take: W&B's takes 2 s, on a busy machine 20 s
SIGNAL_SECONDS = 15  # how long a run that a signal has stopped waits at its end
CHECKPOINT_SECONDS = 120  # how long W&B may read a checkpoint for its MD5: 18 GB of 1558M, at 0.5 GB/s, take 36 s
ANSWER_SECONDS = 60  # how long any other call may take, which takes 1 ms


def group_of(folder: Path) -> str:
    """Return W&B's group for the runs of a sweep in this folder."""
    return folder.name[: MAX_CHARACTERS["group"]]


@dataclass
class LoggerConfig:
    """The keys of the config group `logger`."""

    name: str  # none | wandb | tensorboard
    mode: str  # offline | online
    project: str
    entity: str | None  # the user or team that owns the project; None: the user's default
    group: str | None  # the name of a group of runs
    job_type: str | None
    tags: list[str]
    notes: str | None
    artifacts: bool  # a run that ends ok uploads its best checkpoint

    def __post_init__(self):
        names = ["none", *LIBRARIES]
        check(self.name in names, f"logger.name={self.name}: choose {', '.join(names)}")
        if self.name != "none":
            title, install = LIBRARIES[self.name].title, LIBRARIES[self.name].install
            needed = f"logger={self.name} needs {title}: {install}; or choose logger=none"
            check(find_spec(self.name) is not None, needed)
        takes = self.name == "wandb" or not self.artifacts
        check(takes, "logger.artifacts=true: only W&B takes a checkpoint; add logger=wandb, or choose false")
        check(self.mode in ("offline", "online"), f"logger.mode={self.mode}: choose offline or online")
        if self.name == "wandb":
            self._check_texts()

    def _check_texts(self) -> None:
        """Raise UserError if W&B would refuse a text."""
        is_right = re.fullmatch(r"[^/\\#?%:]{1,128}", self.project) is not None
        check(is_right, f"logger.project={self.project}: W&B takes 1 to 128 characters, and none of / \\ # ? % :")
        for key in ("tags", "job_type", "group", "entity"):
            value, longest = getattr(self, key), MAX_CHARACTERS[key]
            for text in value if isinstance(value, list) else [value]:
                given = f"logger.{key}={text}: W&B takes 1 to {longest} characters"
                check(text is None or 1 <= len(text) <= longest, f"{given}, and these are {len(text or '')}")


class Tracker:
    """Passes each call to a library in a process of its own. If one fails, it prints a warning and passes no more.

    Only finish() and publish_report() wait for the process. With logger=none nothing is passed.
    """

    def __init__(self, config: LoggerConfig):
        self.config = config
        self.process: subprocess.Popen | None = None
        self.socket: socket.socket | None = None
        self.ended = config.name == "none"
        self.unsent, self.received = bytearray(), bytearray()
        self.limits: deque[float] = deque()  # the seconds of each call without an answer
        self.since = 0.0  # when the process could begin with the first of them
        self.answer = None  # to the last call that was answered

    def start(self, folder: Path, row: dict) -> None:
        """Begin a run. `row` has its name and config, and, if the run could be built, its kernels and env."""
        if not self.ended:
            last_step = last_line(folder / "metrics.jsonl").get("step")
            self._call("start", str(folder), row, last_step, seconds=start_seconds())

    def log(self, step: int, figures: dict) -> None:
        self._call("log", step, figures, seconds=ANSWER_SECONDS)

    def log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        """Pass a table, such as samples of text."""
        self._call("log_table", name, columns, rows, seconds=ANSWER_SECONDS)

    def log_checkpoint(self, folder: Path, files: list[str], facts: dict) -> None:
        """Pass the files of a checkpoint; `facts` has its `step` and `val_loss`. finish() waits for the upload."""
        self._call("log_checkpoint", str(folder.resolve()), files, facts, seconds=CHECKPOINT_SECONDS)

    def finish(self, row: dict) -> None:
        if self.process is not None:
            self._call("finish", row, seconds=FINISH_SECONDS + GRACE, is_last=True)

    def publish_report(self, folder: Path, name: str, table: list[list], files: list[Path]) -> str | None:
        """Publish a table, whose first row names its columns, and `files` as a run of W&B with the job_type `report`.

        Returns W&B's folder of the run, or None if it failed.
        """
        arguments, seconds = (str(folder), name, table, [str(file) for file in files]), start_seconds()
        self._call("publish_report", *arguments, seconds=seconds + FINISH_SECONDS + GRACE, is_last=True)
        return self.answer

    def view_line(self, folder: Path, sweep: bool = False) -> str | None:
        """Return the line that says how to see the run in `folder`, or the runs of a sweep; None without advice."""
        return None if self.config.name == "none" else LIBRARIES[self.config.name].view_line(folder, sweep)

    def _call(self, method: str, *arguments, seconds: float, is_last: bool = False) -> None:
        """Send a call, which the process must answer within `seconds`. Wait for the answer to the last call."""
        if self.ended:
            return
        try:
            if self.process is None:
                self._open()
            if not self.limits:
                self.since = time.monotonic()
            self.limits.append(seconds)
            self._send(method, *arguments)
            self._exchange()
            if is_last:
                self._wait(seconds + (self.limits[0] if len(self.limits) > 1 else 0))
        except Exception as error:
            self._end()
            why = f"{LIBRARIES[self.config.name].title} failed ({explain(error)})"
            warn(f"{why}, and the command continues without it; its own files have all figures")
        finally:
            if is_last:
                self._end()

    def _open(self) -> None:
        """Start the process, in a session of its own: the terminal's Ctrl-C does not reach it."""
        self.socket, other_end = socket.socketpair()
        with other_end:
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.tracker_process", str(other_end.fileno()), *sys.argv[1:]],
                # W&B's page shows the command that WANDB_PROGRAM and the arguments make
                env={"WANDB_PROGRAM": " ".join(program()), **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                start_new_session=True,
            )
        self.socket.setblocking(False)
        longest = start_seconds() + FINISH_SECONDS + GRACE
        limits = {"init_seconds": INIT_SECONDS, "finish_seconds": FINISH_SECONDS, "call_seconds": longest}
        self._send(self.config.name, asdict(self.config) | limits)

    def _send(self, *message) -> None:
        self.unsent += f"{json.dumps(message, default=str)}\n".encode()

    def _exchange(self) -> None:
        """Send what the socket takes, and do what the process has sent. It never waits.

        Raises an error if a call failed, if the process has ended, or if the first unanswered call takes too long.
        """
        has_ended = True
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        try:
            while data := self.socket.recv(2**16):
                self.received += data
        except BlockingIOError:
            has_ended = False
        except ConnectionResetError:
            pass
        while b"\n" in self.received:
            line, _, self.received = self.received.partition(b"\n")
            self._do(*json.loads(line))
        if has_ended and self.limits:
            time.sleep(0.1)  # it gets its exit code after the end of its socket
            self._end()
            raise ConnectionError(f"its process ended with {describe_exit(self.process.poll())}")
        if self.limits and time.monotonic() - self.since > self.limits[0]:
            raise TimeoutError(f"its process did not answer within {self.limits[0]:g} s")

    def _do(self, kind: str, value) -> None:
        """Do what the process has sent: the answer to a call, a line to print, or the wish to stop the run."""
        if kind == "done":
            self.answer, self.since = value, time.monotonic()
            self.limits.popleft()
        elif kind == "say":
            print(printable(value), flush=True)
        elif kind == "warn":
            warn(value)
        elif kind == "stop":
            signal.raise_signal(signal.SIGINT)
        else:
            raise RuntimeError(value)

    def _wait(self, seconds: float) -> None:
        """Wait until all calls are answered. Raises an error after `seconds`, or if a signal arrives.

        After a signal, a job may have 30 s before it is killed, as with SLURM and Kubernetes.
        """
        seconds = min(seconds, SIGNAL_SECONDS) if Signals.count else seconds
        end, signals = time.monotonic() + seconds, Signals.count
        while self.limits:
            if Signals.count > signals:
                raise InterruptedError("a signal ended the wait for it")
            if time.monotonic() > end:
                raise TimeoutError(f"its process did not answer within {seconds:g} s")
            time.sleep(0.02)
            self._exchange()

    def _end(self) -> None:
        """Kill the process and all that it has started."""
        self.ended = True
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)  # before wait(), which frees the number for other processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        if self.socket is not None:
            self.socket.close()


def start_seconds() -> float:
    """Return how long a library may take to start: W&B online, and then offline."""
    return IMPORT_SECONDS + 2 * INIT_SECONDS


def track_ended_run(config: LoggerConfig, folder: Path, row: dict) -> None:
    """Send the row of a run that ended before it could do so itself."""
    tracker = Tracker(config)
    tracker.start(folder, row)
    tracker.finish(row)
