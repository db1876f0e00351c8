"""Ctrl-C while a command imports its modules. It is imported first, so it imports no slow module."""

import os
import signal
import sys
from contextlib import suppress


def exit_on_early_interrupt() -> None:
    """Let Ctrl-C end the process at once with one line, until exit_quietly(). Python would print a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may let a background job ignore it
        signal.signal(signal.SIGINT, exit_at_once)


def exit_at_once(*_) -> None:
    with suppress(OSError):
        os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(128 + signal.SIGINT)
