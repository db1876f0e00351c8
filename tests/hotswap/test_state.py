"""hotswap leaves the state of its user's process as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("quick_python")
def test_importing_and_using_hotswap_changes_no_state_of_the_process():
    """tests/hotswap/state.py compares seeds, flags, threads, variables and the rest around every public function."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # a program of ours, such as pytest, sets one of them
    environment = {key: value for key, value in os.environ.items() if key not in names}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hotswap.state"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
