"""Run attempts and predictions in child processes.

Every attempt is a process of its own, because a full memory, a crash or a fragmented allocator then ends with it. The
searching process never touches the GPU, where its context alone would take half a GiB.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.ranks import world_size
from runtime.signals import describe_exit

ROOT = Path(__file__).resolve().parents[2]
PREDICT_MINUTES = 5  # the least time limit of a prediction, which simulates some ten steps without the GPU
REFUSED = "failed: error: "  # a UserError or a KernelError ended the child process
OUT_OF_MEMORY = re.compile(
    "out.of.(GPU.)?memory|alloc(ation)?_failed|bad_alloc|cannot allocate|MemoryError|could not create a primitive",
    re.IGNORECASE,
)  # what libraries print when the memory is full; the last is oneDNN's
RANK_ERROR = re.compile(r"error: |\[rank\d+\]: \w")  # how an error of a process under torchrun begins
ROOT_CAUSE = re.compile(r"^Root Cause.*?exitcode +: (-?\d+)", re.DOTALL | re.MULTILINE)  # in torchrun's report


@dataclass
class ProbeResult:
    """What a child process printed. `failure` says why the process failed; it is None if the process succeeded."""

    failure: str | None = None
    why: str | None = None  # the out-of-memory error
    env: dict | None = None
    limit_gib: float | None = None  # memory_gib, or the device's memory
    usable_gib: float | None = None  # how much of limit_gib is free
    kernels: dict | None = None
    row: dict | None = None  # the row of an attempt, or a prediction
    host_tokens: int | None = None  # how many the host has room for, if it holds the inputs of blocks
    can_shorten: bool = False  # whether a slow attempt can be shortened (see lab.context.attempt.run_attempt)


@dataclass
class Prober:
    """Runs attempts and predictions in child processes. Under torchrun, an attempt is a job of as many processes.

    `command` are arguments of Python. The program takes probe=run or probe=predict, and prints the fields of a
    ProbeResult as JSON.
    """

    command: list[str]
    minutes: float  # time limit of an attempt

    def predict(self, mode: str, length: int | None = None) -> ProbeResult:
        """Predict the memory at `length`; without a length, predict the longest length that fits."""
        return self.run([], max(self.minutes, PREDICT_MINUTES), probe="predict", mode=mode, length=length or "null")

    def attempt(self, mode: str, length: int, shortened: bool) -> ProbeResult:
        """Run one attempt."""
        launcher = []
        if world_size() > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size()}"]
        overrides = {"probe": "run", "mode": mode, "length": length, "shortened": str(shortened).lower()}
        return self.run(launcher, self.minutes, **overrides)

    def run(self, launcher: list[str], minutes: float, **overrides: Any) -> ProbeResult:
        """Run the command with these overrides, for at most `minutes`."""
        overrides = [f"{key}={value}" for key, value in overrides.items()]
        words = [sys.executable, *launcher, *self.command, *overrides]
        # The child runs in the current folder, where relative paths on the command line start
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out,
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as err,
        ):
            child = subprocess.Popen(
                words, env=os.environ | {"PYTHONPATH": python_path}, stdout=out, stderr=err, start_new_session=True
            )
            try:
                code = child.wait(60 * minutes)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if child.poll() is None and launcher:
                    child.terminate()  # torchrun ends its processes, which are in groups of their own
                    child.wait()
                elif child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)  # kills the compiler's workers too
                    child.wait()
            out.seek(0)
            err.seek(0)
            facts = {key: value for line in out if line.startswith("{") for key, value in json.loads(line).items()}
            errors = err.read().strip()
        if code is None:
            facts["failure"] = "timeout"
        elif code:
            error_lines = errors.splitlines()
            if launcher:  # any process may be the first to fail, and torchrun's own lines come last
                full = [line for line in error_lines if OUT_OF_MEMORY.search(line)]
                error_lines = full or [line for line in error_lines if RANK_ERROR.match(line)]
                if first := ROOT_CAUSE.search(errors):
                    code = int(first[1])
            # a process that a signal ended may have printed a warning before
            last_line = error_lines[-1] if error_lines and code > 0 else describe_exit(code)
            if OUT_OF_MEMORY.search(last_line):
                facts |= {"failure": "oom", "why": last_line}
            else:
                facts["failure"] = f"failed: {last_line}"
        return ProbeResult(**facts)
