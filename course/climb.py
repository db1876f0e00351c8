"""Start a rung: `python course/01_vector_add.py`. lab/bench/rung.py does the work, and says what a rung defines."""

import os
import sys
from pathlib import Path

import torch


def climb(path: str) -> None:
    """Measure the rung `path`, which is the main program. Without a GPU, Triton's interpreter runs its kernels."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        environ = os.environ | {"TRITON_INTERPRET": "1"}  # @triton.jit reads it, and has read it: start again
        os.execve(sys.executable, [sys.executable, *sys.argv], environ)
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of course/, so that the repo's rooms are found
    from lab.bench.rung import measure_main

    measure_main(path, *sys.argv[1:])
