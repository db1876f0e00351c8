"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C end a loop after its current step. Outside of a loop, they end the program.

SLURM sends SIGUSR1 before the time limit of a job that asks for it, and SIGTERM before it takes the machines away. A
terminal that closes sends SIGHUP. A program under nohup ignores it. Child processes in a process group of their own do
not get it, so their parent ends them.

A second Ctrl-C ends the program at once, too. A command without Signals ends at the first Ctrl-C.

Python calls a handler in the main thread, and only between two instructions of Python. A whole backward is one
instruction, and takes minutes on a CPU. So a thread answers Ctrl-C: Python's own handler in C writes the number of each
signal into a pipe, and the thread reads the pipe.
"""

import atexit
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.terminal import LostOutput, class_and_message, outlive_output, set_up_streams, warn
from runtime.interrupt import exit_at_once

STOPPED = 75  # the exit code of a run that can be resumed: EX_TEMPFAIL of sysexits.h
HANDLER_SECONDS = 1.0  # if Python has not called the handler of Ctrl-C after this time, the thread ends the process


class Stopped(SystemExit):
    """A signal ended the run. The program exits with `code`, which is STOPPED if a checkpoint was written."""

    status = "stopped"  # the word in a result row

    def __init__(self, code: int, why: str):
        super().__init__(code)
        self.why = why

    def __str__(self) -> str:
        return self.why


class Signals:
    """Within this context, SIGTERM, SIGUSR1, SIGHUP and Ctrl-C raise Stopped; under nohup, SIGHUP stays ignored.

    While `looping` is true, they only set `received` to the signal's name, but a second Ctrl-C raises Stopped. If the
    main thread does not raise it within HANDLER_SECONDS, a thread ends the process. With `requeue`, a SLURM job that
    SIGUSR1 has stopped is put back into the queue at the end.
    """

    count = 0  # of the signals that this process has handled

    def __init__(self, requeue: bool = False):
        self.requeue = requeue
        self.looping = False
        self.received: str | None = None
        self.previous_handlers: dict = {}
        self.interrupts_handled = 0
        self.writer: int | None = None  # of the pipe that Python writes the numbers of signals into
        self.answerer: threading.Thread | None = None
        self.record: Callable[[str], None] | None = None  # writes the status of the run that the thread ends

    def start_loop(self, record: Callable[[str], None]) -> None:
        """Let signals end the program after a step from now on. `record` writes the status of its run."""
        self.looping = True
        self.record = record

    def __enter__(self) -> "Signals":
        outlive_output()
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, *hangup):
                self.previous_handlers[number] = signal.signal(number, self._handle)
            reader, self.writer = os.pipe()
            os.set_blocking(self.writer, False)
            os.register_at_fork(after_in_child=self._close_pipe_in_child)
            self.previous_writer = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
            self.answerer = threading.Thread(target=self._answer_interrupts, args=(reader,), daemon=True)
            self.answerer.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.writer is not None:
            signal.set_wakeup_fd(self.previous_writer)
            os.close(self.writer)  # ends the thread
            self.writer = None
        try:
            if self.answerer is not None:
                self.answerer.join(2 * HANDLER_SECONDS)  # what it has to say is printed before the program ends
        finally:  # a signal ends the wait
            self.record = None  # the hook of os.fork() keeps this object, which would keep the run
            for number, handler in self.previous_handlers.items():
                signal.signal(number, handler)
        # Not after SIGTERM: scancel sends it, too, and SLURM itself requeues a preempted job
        resumable = isinstance(error, Stopped) and error.code == STOPPED and self.received == "SIGUSR1"
        if self.requeue and resumable and os.environ.get("RANK", "0") == "0":
            requeue_slurm_job()

    def stop(self, when: str) -> None:
        """Raise Stopped with the exit code STOPPED. Call this after a signal, when a checkpoint is written."""
        raise Stopped(STOPPED, f"{self.received or 'a signal'} {when}")

    def _handle(self, number: int, frame) -> None:
        name = signal.Signals(number).name
        Signals.count += 1
        if number == signal.SIGINT:
            self.interrupts_handled += 1
        second_interrupt = number == signal.SIGINT and self.received == name
        if second_interrupt or not self.looping:
            reason = f"{name} twice" if second_interrupt else name
            raise Stopped(128 + number, reason)  # the exit code that a shell gives to a process ended by a signal
        self.received = name

    def _close_pipe_in_child(self) -> None:
        """Close the pipe in a forked child. The terminal sends Ctrl-C to the child, too: the parent would count two."""
        if self.writer is not None:
            signal.set_wakeup_fd(-1)
            os.close(self.writer)
            self.writer = self.answerer = None

    def _answer_interrupts(self, reader: int) -> None:
        """Answer each Ctrl-C whose number comes out of the pipe, until the pipe is closed."""
        interrupts = 0
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] == signal.SIGINT:
                    interrupts += 1
                    self._answer_interrupt(interrupts)

    def _answer_interrupt(self, count: int) -> None:
        """Answer Ctrl-C number `count`: print a line, or end the process if the main thread does not end it in time."""
        if self.looping and count == 1:
            if self.record and os.environ.get("RANK", "0") == "0":
                line = "SIGINT   ends the run after its step, or at its end; a second Ctrl-C ends it at once"
                print(f"{line}\n", end="", file=sys.stderr, flush=True)  # one write: the main thread may print, too
            return
        deadline = time.monotonic() + HANDLER_SECONDS
        while self.interrupts_handled < count and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.interrupts_handled < count:
            try:
                if self.record:
                    self.record("stopped: SIGINT twice")
            except Exception as error:
                warn(f"the row keeps its status: {class_and_message(error)}")
            exit_at_once()


def requeue_slurm_job() -> None:
    """Put this SLURM job back into the queue, which ends it. Print a warning if that fails."""
    if "SLURM_JOB_ID" not in os.environ:
        warn("runtime.requeue=true requeues nothing outside a SLURM job: SLURM_JOB_ID is not set; start the run again")
        return
    command = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        problem = done.stderr.strip() if done.returncode else None
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        warn(f"`{' '.join(command)}` failed, so submit the job again: {problem}")


def describe_exit(code: int) -> str:
    """Name the exit code, and the signal that ended the process if there was one."""
    return f"exit code {code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"


@contextmanager
def exit_quietly() -> Iterator[None]:
    """Exit without a traceback after Ctrl-C (code 130), and if the output cannot be written.

    Ctrl-C raises KeyboardInterrupt within this context, and does nothing after it, because the program ends there.
    If the reader of the output has ended, as in `python -m scripts.doctor | head -1`, the code is 141, and on a full
    disk 1. A command that records something goes on: see terminal.outlive_output().
    """
    set_up_streams()
    if signal.getsignal(signal.SIGINT) in (exit_at_once, ignore_interrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Later, at its very end, Python removes our handler, but keeps SIG_IGN
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, because an error at the interpreter's exit cannot be caught
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, ignore_interrupt)
    except LostOutput as error:
        sys.exit(128 + signal.SIGPIPE if error.errno == errno.EPIPE else f"error: stdout: {error.strerror}")
    except (KeyboardInterrupt, Stopped, Exception) as error:
        interrupt = find_interrupt(error)
        if interrupt is None:
            raise
        code = interrupt.code if isinstance(interrupt, Stopped) else 128 + signal.SIGINT
        if code == 128 + signal.SIGINT:
            print("interrupted", file=sys.stderr)
        sys.exit(code)


def ignore_interrupt(*_) -> None:
    """Handle Ctrl-C while Python ends: a KeyboardInterrupt would print a traceback, or change the exit code."""


def find_interrupt(error: BaseException | None) -> BaseException | None:
    """Return the KeyboardInterrupt or Stopped that caused this error, or is this error; None if neither did.

    Python 3.11 turns an interrupt within a class's __set_name__ into a RuntimeError. This happens in Dynamo's import.
    """
    while error and not isinstance(error, KeyboardInterrupt | Stopped):
        error = error.__cause__
    return error
