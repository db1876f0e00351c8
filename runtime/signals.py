"""SIGTERM and Ctrl-C ask a loop to end after its step; a second Ctrl-C ends it at once."""

import signal
import threading

STOPPED = 75  # the exit code of a run that can go on: EX_TEMPFAIL of sysexits.h


class Signals:
    """While entered, `received` is the name of the signal that came, or None."""

    def __init__(self):
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
        if number == signal.SIGINT and self.received == "SIGINT":
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
