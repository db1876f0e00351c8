"""Let a process be killed, or an operation fail, at its n-th operation on the files below a folder.

faults.c sees what every library does, once preload() has compiled it and started the program again with it.
"""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from enum import IntFlag, auto
from pathlib import Path

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
    """Start this program again with faults.c in it. Call this before other imports, which then happen once."""
    if os.environ.pop(STARTED, None):
        os.unlink(os.environ.pop("LD_PRELOAD"))  # the programs that this one starts do not need it
    else:
        if not shutil.which("cc"):
            sys.exit("error: the crash test compiles faults.c and finds no cc: apt install gcc")
        file, library = tempfile.mkstemp(".so", "crashtest-")
        os.close(file)
        compile_to(library)
        os.environ |= {STARTED: "1", "LD_PRELOAD": library}
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def compile_to(library: str) -> None:
    """Compile faults.c, which needs Linux and the compiler cc."""
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)


def arm(folder: Path, operations: Operation, at: int, error: str | None, forever: bool, counts: COUNTS) -> None:
    """Let operation number `at` of these kinds below the folder fail in this process: 0 is the first one, -1 is none.

    `error` is the name of an errno; None kills the process. With `forever`, the later operations fail, too. The
    process counts its operations in `counts`, which is shared_counts().
    """
    number = getattr(errno, error) if error else 0
    library = ctypes.CDLL(None)
    library.arm_crashtest(os.fsencode(folder), int(operations), ctypes.c_long(at), number, int(forever), counts)
