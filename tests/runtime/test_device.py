"""The machine."""

import os
import subprocess
import sys

import pytest

NAMES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize("given", [{}, {NAMES[0]: "max_split_size_mb:64"}, {NAMES[1]: "max_split_size_mb:64"}])
def test_the_allocator_is_set_in_time_and_only_by_one(given):
    """What PyTorch then reads: its import comes first, and what the user says counts."""
    program = "import torch, runtime.device; print(torch._C._accelerator_getAllocatorSettings())"
    environment = {key: value for key, value in os.environ.items() if key not in NAMES} | given
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == next(iter(given.values()), "expandable_segments:True")
