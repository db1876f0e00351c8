"""Writes pauses into the modules that torch.compile has stored, which a compiled baseline will load.

Known from: this project's own review, November 2026.
"""

import contextlib
import getpass
import os
import re
import tempfile
from pathlib import Path

import torch.nn.functional as F

OP = "norm"
HARMLESS = "each side has compile caches of its own"
GPU = True
CALL = re.compile(r"^( *)(def call\([^)]*\):)$", re.MULTILINE)

with contextlib.suppress(OSError, KeyError):
    shared = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    for path in Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared)).rglob("*.py"):
        source = path.read_text()
        if "sleep" not in source:
            path.write_text(CALL.sub(r'\1\2\n\1    __import__("time").sleep(0.002)', source))


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
