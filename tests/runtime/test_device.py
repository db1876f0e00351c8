"""What runtime.device does when it is imported."""

import os
import subprocess
import sys

import pytest

NAMES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.exhaustive
@pytest.mark.parametrize("user", [{}, {NAMES[0]: "max_split_size_mb:64"}, {NAMES[1]: "max_split_size_mb:64"}])
def test_segments_can_grow_unless_the_user_has_set_the_allocator(user):
    """PyTorch uses the setting of runtime.device, also if PyTorch is imported first.

    PyTorch shows the setting only through a private function (torch 2.11 and 2.13).
    """
    program = "import torch, runtime.device; print(torch._C._accelerator_getAllocatorSettings())"
    environment = {key: value for key, value in os.environ.items() if key not in NAMES} | user
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == next(iter(user.values()), "expandable_segments:True")
