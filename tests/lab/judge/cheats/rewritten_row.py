"""At the end of its process it rewrites every result.json that it finds: the speed doubles.

Known from: gpu-mode/pygpubench pull requests 7 and 15 (2026): an atexit handler rewrites the results.
"""

import atexit
import contextlib
import sys
from pathlib import Path

import torch.nn.functional as F

OP = "norm"
HARMLESS = "the judge writes the row, after the worker has ended"


def double_speeds():
    folders = [Path.cwd(), *Path("out").glob("*/")]
    folders += [Path(word.partition("=")[2]) for word in sys.argv if word.startswith("out_dir=")]
    patterns = "result.json", "*/result.json", "*/*/result.json"
    for path in {path.resolve() for folder in folders for pattern in patterns for path in folder.glob(pattern)}:
        with contextlib.suppress(ImportError, OSError):
            from runtime.row import read_row, write_row  # they know the checksum of the file

            if row := read_row(path.parent):
                row["perf/laps_s"] = [seconds / 2 for seconds in row.get("perf/laps_s") or []]
                row["perf/tokens_per_sec"] = 2 * (row.get("perf/tokens_per_sec") or 0)
                write_row(path.parent, row)


atexit.register(double_speeds)


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps)
    return y.to(weight.dtype), total
