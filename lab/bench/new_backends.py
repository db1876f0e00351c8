"""Check a backend that is not part of this repo, before a run trusts it.

It runs forward and backward at two small shapes, the first case of its contract and the widths of this model, in a
process of its own. It must follow the rule of kernels/check.py. So a kernel with a wrong eps or a missing gradient
stops the run before its first step, and one that crashes becomes an error in one line. Nothing is stored, because the
kernel could write the answer itself. The backends of this repo are not checked, because tests/kernels tests them: the
files that git tracks. Without git every backend is checked.

A kernel that is made to look right passes this check. The judge (lab/judge/) does not trust the kernel.
"""

import functools
import os
import re
import subprocess
from collections.abc import Sequence

import torch

from common.terminal import override, shell_command
from kernels.lookup import ROOT, files, source
from kernels.registry import OPS, AttnConfig, KernelError, KernelsConfig, contract, impl_by_op
from lab.bench.probe import ERRORS, Probe, first_probe, first_word, run_probes

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
    kernels: KernelsConfig,
    attn: AttnConfig,
    device: torch.device,
    ops: Sequence[str] = OPS,
    calls: dict[str, tuple[dict, torch.dtype]] | None = None,
) -> dict[str, str]:
    """Return {op: the doctor's status} of each chosen backend that is new, for its last probe.

    `ops` are the ops that the run calls, and `calls` are small calls of this model: op -> (the arguments of the
    contract's inputs(), dtype). A backend may refuse the first case, but not these. With kernels.check=false it checks
    nothing, and returns {}. Raises WrongKernel, which names the file, if such a backend is wrong, and KernelError if a
    check has no answer.
    """
    if not kernels.check:
        return {}
    chosen = {op: impl for op, impl in impl_by_op(kernels, attn, ops).items() if impl not in tracked_backends(op)}
    probes = []
    for op, impl in chosen.items():
        [first] = [*next(iter(first_probe(op, impl, device).values())).values()]
        own = [Probe(op, impl, *calls[op])] if op in (calls or {}) else []
        probes.append([first, *own])
    statuses = {}
    for op, answers in zip(chosen, run_probes(probes, device, LIMIT), strict=True):
        wrong = [answer for answer in answers if first_word(answer) in ERRORS]
        statuses[op] = wrong[0] if wrong else answers[-1]
    for op, status in statuses.items():
        doctor = shell_command("python", "-m", "scripts.doctor", f"op={op}", override("impl", chosen[op]))
        more = f"{doctor} tells more, and kernels.check=false runs it"
        refused = first_word(status) == "unavailable" and op in (calls or {})
        if refused or first_word(status) == "undecided":
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
