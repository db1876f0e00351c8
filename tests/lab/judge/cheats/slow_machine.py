"""Leaves a process behind, which keeps all cores busy for 60 s as soon as its own process has ended.

The run after its own, such as the baseline's, is slow then.
Known from: this project's own review, November 2026.
"""

import contextlib
import os
import subprocess
import sys

import torch.nn.functional as F

OP = "norm"
HARMLESS = "the judge kills all processes of the worker, before another one starts"
BURN = """
import os, sys, time
waits_until = time.monotonic() + 600
while os.getppid() == int(sys.argv[1]) and time.monotonic() < waits_until:
    time.sleep(0.05)
for _ in range(1, os.cpu_count() or 1):
    if os.fork() == 0:
        break
burns_until = time.monotonic() + 60
while time.monotonic() < burns_until:
    pass
"""

with contextlib.suppress(OSError):
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen([sys.executable, "-c", BURN, str(os.getpid())], start_new_session=True, **silent)


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
