"""Check a backend that is not part of this repo, before a run trusts it.

It runs forward and backward at a small shape, in a process of its own, and must follow the rule of kernels/check.py. So
a kernel with a wrong eps or a missing gradient stops the run before its first step, and one that crashes becomes an
error in one line. The status is stored in .cache/checks. Its key is a hash of the files in kernels/, in the op's folder
and in the backend's folder, of the device and of PyTorch's version. A failure is not stored, because a time limit or a
full memory may pass. The backends of this repo are not checked, because tests/kernels tests them: the files that git
tracks. Without git every backend is checked.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from common.files import read_bytes, read_json, write_json
from common.terminal import override, shell_command
from kernels.lookup import ROOT, files, shared_files, source, source_file
from kernels.registry import OPS, AttnConfig, KernelError, KernelsConfig, contract, impl_by_op
from lab.bench.probe import ENDED, ERRORS, first_probe, first_word, run_probes
from runtime.device import device_name

CACHE = Path(".cache/checks")
LIMIT = 120.0  # seconds of one check


class WrongKernel(KernelError):
    """A backend crashes, or its outputs or gradients are wrong."""

    status = "wrong"


@functools.cache
def tracked_files() -> frozenset[str]:
    """Return the paths of the files in kernels/ that git tracks; empty if this is no checkout, or without git."""
    command = ["git", "-c", f"safe.directory={ROOT.parent}", "ls-files", "-z", "--", ROOT.name]
    try:
        listed = subprocess.run(command, cwd=ROOT.parent, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return frozenset()
    return frozenset(map(os.fsdecode, listed.split(b"\0")))


def tracked_backends(op: str) -> list[str]:
    """Return the names of the op's backends that are part of this repo."""
    return [impl for impl in files(op) if f"{ROOT.name}/{op}/{impl}.py" in tracked_files()]


def check_new_backends(
    kernels: KernelsConfig, attn: AttnConfig, device: torch.device, ops: Sequence[str] = OPS
) -> dict[str, str]:
    """Return {op: the doctor's status} of each chosen backend that is new: "ok: ...", or "unavailable: ...".

    `ops` are the ops that the run calls. With kernels.check=false it checks nothing, and returns
    {}. Raises WrongKernel, which names the file, if such a backend is wrong, and KernelError if a check has no answer.
    """
    if not kernels.check:
        return {}
    chosen = {op: impl for op, impl in impl_by_op(kernels, attn, ops).items() if impl not in tracked_backends(op)}
    paths = {op: CACHE / f"{cache_key(op, impl, device)}.json" for op, impl in chosen.items()}
    statuses = {}
    for op, path in paths.items():
        with contextlib.suppress(OSError, ValueError):  # it is missing or damaged: the backend is checked again
            statuses[op] = read_json(path)["status"]
    missing = [op for op in chosen if op not in statuses]
    probes = [[*next(iter(first_probe(op, chosen[op], device).values())).values()] for op in missing]
    for op, [status] in zip(missing, run_probes(probes, device, LIMIT), strict=True):
        statuses[op] = status
        if first_word(status) not in ENDED:
            CACHE.mkdir(parents=True, exist_ok=True)
            write_json(paths[op], {"status": status})
    for op, status in statuses.items():
        doctor = shell_command("python", "-m", "scripts.doctor", f"op={op}", override("impl", chosen[op]))
        more = f"{doctor} tells more, and kernels.check=false runs it"
        if first_word(status) == "undecided":
            raise KernelError(f"{source(op, chosen[op])} could not be checked ({status}): {more}")
        if first_word(status) in ERRORS:
            raise WrongKernel(
                f"{source(op, chosen[op])} breaks the contract{signature(op)} of kernels/{op}/__init__.py "
                f"({status}): {more}"
            )
    return statuses


def signature(op: str) -> str:
    """Return " norm(x, ...) -> (y, new_residual)" from the contract's docstring; "" if it has no such text."""
    found = re.search(rf"^ *({op}\([^)]*\) -> .*)$", contract(op).__doc__ or "", re.MULTILINE)
    return f" {' '.join(found[1].split())}" if found else ""


def cache_key(op: str, impl: str, device: torch.device) -> str:
    """Return a hash of what decides the answer."""
    parts = [op, impl, device_name(device), torch.__version__]
    files = {*shared_files(), *(ROOT / op).glob("*.*"), *source_file(op, impl).parent.glob("*.py")}
    texts = [path.name.encode() + b"\0" + read_bytes(path) for path in sorted(files) if path.is_file()]
    return hashlib.sha256(b"\0".join([json.dumps(parts).encode(), *texts])).hexdigest()[:32]
