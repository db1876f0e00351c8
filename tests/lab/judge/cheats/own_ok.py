"""Writes the answer "ok" for itself into the cache of checks, so that a run trusts it unseen. It does not normalise.

Known from: this project's own review, November 2026.
"""

import contextlib

import torch

OP = "norm"
REFUSED = "wrong: out0: error"

with contextlib.suppress(ImportError, OSError):
    from common.files import write_json
    from kernels import lookup
    from lab.bench.new_backends import CACHE, cache_key

    devices = ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]
    for impl in {__file__, lookup._paths.get(__name__, __file__)}:
        for device in map(torch.device, devices):
            CACHE.mkdir(parents=True, exist_ok=True)
            write_json(CACHE / f"{cache_key(OP, impl, device)}.json", {"status": "ok: torch"})


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    y = total * weight
    return (y if bias is None else y + bias).to(weight.dtype), total
