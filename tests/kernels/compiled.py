"""Compile our Triton kernels for every compute capability, and write results/compiled.json: `make compiled`.

compile_triton.py compiles, and lab/report/compiled_table.py makes the tables of the READMEs from the file.
"""

import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton

from lab.report.compiled_table import GPUS, Usage, write_usage

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^(.*): (\d+) registers, (\d+) bytes of stack, (\d+) of shared memory$", re.MULTILINE)


def compile_for(capability: int) -> tuple[int, str]:
    """Compile every kernel for this compute capability in another process: return its exit code and its output."""
    command = [sys.executable, "-m", "tests.kernels.compile_triton", str(capability)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    options = {"capture_output": True, "text": True, "env": environment, "cwd": ROOT}
    done = subprocess.run(command, **options)
    return done.returncode, done.stdout + done.stderr


def digest_sources() -> str:
    """Return a SHA-256 that changes with the code from which compile_triton.py makes the kernels."""
    files = [ROOT / "tests/kernels/compile_triton.py", *sorted((ROOT / "kernels").rglob("*.py"))]
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()


def read_lines(text: str) -> Usage:
    """Return what the lines of compile_triton.py say. If several kernels share a name, take the largest numbers."""
    usage: Usage = {}
    for name, *numbers in LINE.findall(text):
        usage[name] = [max(pair) for pair in zip(map(int, numbers), usage.get(name, [0, 0, 0]), strict=True)]
    return usage


def main() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compile_for, GPUS))
    for capability, (code, text) in zip(GPUS, results, strict=True):
        if code:
            sys.exit(f"{text}\nerror: a kernel does not compile for compute capability {capability / 10}: see above")
    usage = {capability: read_lines(text) for capability, (_, text) in zip(GPUS, results, strict=True)}
    write_usage(triton.__version__, digest_sources(), usage)
    print(*(f"{capability / 10}: {len(used)} kernels" for capability, used in usage.items()), sep="\n")


if __name__ == "__main__":
    main()
