"""Let a process be killed, or an operation fail, at its n-th operation on the files below a folder.

faults.c sees what every library does, once preload() has compiled it and started the program again with it. Without a
compiler, Python's audit events take its place: they see what Python opens, makes, renames and removes, but no reads and
writes.
"""

import ctypes
import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from enum import IntFlag, auto
from pathlib import Path

from common.terminal import warn

SOURCE = Path(__file__).with_name("faults.c")
STARTED = "HOTSWAP_CRASHTEST"  # the environment variable that says that preload() has started this program again


class Operation(IntFlag):
    """The kinds of operations, in the order of faults.c."""

    OPEN = auto()  # a file or a folder, to read it
    READ = auto()
    STAT = auto()
    CREATE = auto()
    WRITE = auto()
    SYNC = auto()
    MAKE = auto()  # a folder or a link
    RENAME = auto()
    REMOVE = auto()
    OUTPUT = auto()  # a write to stdout or stderr


COUNTS = ctypes.c_long * (1 + len(Operation))  # of the chosen kinds together, and of each kind
LOOK = Operation.OPEN | Operation.READ | Operation.STAT
CHANGE = Operation.CREATE | Operation.WRITE | Operation.SYNC | Operation.MAKE | Operation.RENAME | Operation.REMOVE
CAN_FAIL = {  # with this error
    "ENOSPC": CHANGE & ~Operation.REMOVE,
    "EIO": LOOK | CHANGE,
    "EMFILE": Operation.OPEN | Operation.CREATE,
    "EINTR": Operation.READ | Operation.CREATE | Operation.WRITE | Operation.SYNC,
    "EACCES": Operation.OPEN | Operation.STAT | Operation.CREATE | Operation.MAKE | Operation.RENAME | Operation.REMOVE,
}


def shared_counts() -> COUNTS:
    """Return COUNTS in memory that this process shares with its forks."""
    return COUNTS.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))


def count(counts: Sequence[int], operations: Operation) -> int:
    """Return how many operations of these kinds there are in COUNTS."""
    return sum(counts[kind.bit_length()] for kind in operations)


def preload() -> None:
    """Start this program again with faults.c in it. Without a compiler, print a warning and go on.

    Call this before other imports, which then happen once.
    """
    if os.environ.pop(STARTED, None):
        library, _, others = os.environ.pop("LD_PRELOAD").partition(":")
        os.environ |= {"LD_PRELOAD": others} if others else {}  # the programs that this one starts do not need ours
        os.unlink(library)
    else:
        file, library = tempfile.mkstemp(".so", "crashtest-")
        os.close(file)
        if not (reason := compile_to(library)):
            others = os.environ.get("LD_PRELOAD")
            os.environ |= {STARTED: "1", "LD_PRELOAD": f"{library}:{others}" if others else library}
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        os.unlink(library)
        warn(f"{reason}: only operations that Python's audit events show can fail, and no read or write of a file")


def compile_to(library: str) -> str | None:
    """Compile faults.c. Return the reason if that fails, or None."""
    if sys.platform != "linux" or not shutil.which("cc"):
        return "there is no Linux with the compiler cc"
    done = subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], capture_output=True)
    return f"cc cannot compile {SOURCE.name}" if done.returncode else None


def is_preloaded() -> bool:
    return hasattr(ctypes.CDLL(None), "arm_crashtest")


def arm(folder: Path, operations: Operation, at: int, error: str | None, forever: bool, counts: COUNTS) -> None:
    """Let operation number `at` of these kinds below the folder fail in this process: 0 is the first one, -1 is none.

    `error` is the name of an errno; None kills the process. With `forever`, the later operations fail, too. The
    process counts its operations in `counts`, which is shared_counts().
    """
    number = getattr(errno, error) if error else 0
    if is_preloaded():
        library = ctypes.CDLL(None)
        library.arm_crashtest(os.fsencode(folder), int(operations), ctypes.c_long(at), number, int(forever), counts)
    else:
        sys.addaudithook(AuditHook(f"{folder}/", operations, at, number, forever, counts))


EVENTS = {  # event -> (the kind of the operation, the number of the argument with its path)
    "os.listdir": (Operation.OPEN, 0),
    "os.scandir": (Operation.OPEN, 0),
    "os.truncate": (Operation.WRITE, 0),
    "os.mkdir": (Operation.MAKE, 0),
    "os.symlink": (Operation.MAKE, 1),
    "os.rename": (Operation.RENAME, 1),
    "os.remove": (Operation.REMOVE, 0),
    "os.rmdir": (Operation.REMOVE, 0),
}


class AuditHook:
    """What takes the place of faults.c. Its arguments are arm()'s."""

    def __init__(self, folder: str, operations: Operation, at: int, number: int, forever: bool, counts: COUNTS):
        self.folder, self.operations, self.at, self.number, self.forever = folder, operations, at, number, forever
        self.counts, self.lock = counts, threading.RLock()

    def __call__(self, event: str, arguments: tuple) -> None:
        if event == "open":
            kind, place = Operation.CREATE if arguments[2] & os.O_CREAT else Operation.OPEN, 0
        else:
            kind, place = EVENTS.get(event, (Operation(0), 0))
        if not kind or not isinstance(arguments[place], str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(arguments[place]))
        if not path.startswith(self.folder):
            return
        with self.lock:
            number = self.counts[0] if kind in self.operations else -1
            self.counts[0] += kind in self.operations
            self.counts[kind.bit_length()] += 1
        if number >= 0 and (number == self.at or (self.forever and number > self.at >= 0)):
            if not self.number:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.number, os.strerror(self.number), path)
