"""SIGTERM and Ctrl-C ask a loop to end after its step; outside of a loop, or a second Ctrl-C, they end it at once."""

import signal
import threading

STOPPED = 75  # the exit code of a run that can go on: EX_TEMPFAIL of sysexits.h


class Stopped(SystemExit):
    """A signal ended the run; the program exits with `code`, STOPPED where a checkpoint is written."""

    status = "stopped"  # the word in a result row

    def __init__(self, code: int, why: str):
        super().__init__(code)
        self.why = why

    def __str__(self) -> str:
        return self.why


class Signals:
    """While entered, signals raise Stopped; while `looping` is set, they are only noted in `received`."""

    def __init__(self):
        self.looping = False
        self.received: str | None = None
        self.before: dict = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # Python lets no other one ask
            self.before = {number: signal.signal(number, self._came) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame) -> None:
        name = signal.Signals(number).name
        again = number == signal.SIGINT and self.received == name
        if again or not self.looping:
            raise Stopped(128 + number, f"{name}{' twice' * again}")  # as a shell counts
        self.received = name
