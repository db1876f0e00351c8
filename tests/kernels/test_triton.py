"""Our Triton kernels compiled for GPUs that are not here. What they compute: test_backends.py, in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton", reason="Triton is for Linux")


@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_and_do_not_spill(capability):
    command = [sys.executable, "-m", "tests.kernels.compile_triton", str(capability)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("registers") == 15
