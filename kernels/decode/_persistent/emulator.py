"""Test equipment: run persistent.cu on a CPU, one thread after the other. emulator.h is the machine."""

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from common.files import read_text
from kernels.registry import cpp_compiler
from kernels.tuned import user_cache

FOLDER = Path(__file__).parent
FLAGS = ["-DEMULATOR", "-xc++", "-std=c++17", "-Og", "-shared", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w"]
# The seed of the threads' random order; the number of a block that does not run, and of one that runs late; -1: none
schedule = {"seed": 0, "absent": -1, "slow": -1}


@functools.lru_cache
def compile_for_cpu(options: tuple[str, ...]) -> Callable[[ctypes.Structure], None]:
    """Return persistent.cu as a function of its arguments, compiled with these -D options.

    Raises RuntimeError if they do not compile.
    """
    source = FOLDER.with_name("persistent.cu")
    sources = [source, *sorted(FOLDER.glob("*.cuh")), *sorted(FOLDER.glob("*.h"))]
    content = "".join([*options, *FLAGS, *map(read_text, sources)])
    cache = user_cache() / "emulator"
    library = cache / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [cpp_compiler(), *FLAGS, *options, "-o", str(unfinished), str(source)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            raise RuntimeError(done.stderr)
        unfinished.replace(library)
    emulate = ctypes.CDLL(str(library)).emulate

    def run(arguments: ctypes.Structure) -> None:
        assert emulate(ctypes.byref(arguments), *schedule.values()), "the emulated launch hangs"

    return run
