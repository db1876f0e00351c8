"""Check a backend that is not part of this repo, before a run trusts it.

It runs forward and backward at a small shape, in a process of its own, and must follow the rule of kernels/check.py. So
a kernel with a wrong eps or a missing gradient stops the run before its first step, and one that crashes becomes an
error in one line. The status is stored in .cache/checks. Its key is a hash of the files in kernels/, in the op's folder
and in the backend's folder, of the device and of PyTorch's version. A failure is not stored, because a time limit or a
full memory may pass. The backends in SHIPPED are not checked, because tests/kernels tests them.
"""

import contextlib
import hashlib
import json
from pathlib import Path

import torch

from files import read_bytes, read_json, write_json
from kernels.lookup import ROOT, source, source_file
from kernels.registry import AttnConfig, KernelError, KernelsConfig, contract, impl_by_op
from lab.bench.probe import ENDED, ERRORS, first_probe, first_word, run_probes
from runtime.device import device_name
from terminal import override, shell_command

SHIPPED = {
    "norm": "auto eager helion liger quack triton triton_recompute",
    "linear": "auto eager torchao triton",
    "attention": "auto cudnn eager flash flex gluon math mem_efficient sdpa triton triton_naive",
    "mlp": "auto eager gluon gluon_recompute nvmath torchao triton triton_recompute",
    "loss": "auto eager gluon gluon_whole helion liger liger_cute liger_large torch_chunked triton triton_whole",
    "adamw": "auto eager triton",
    "decode": "blocks flashinfer huggingface int8 persistent persistent_int8 torchao triton",
}
CACHE = Path(".cache/checks")
LIMIT = 120.0  # seconds of one check


class WrongKernel(KernelError):
    """A backend crashes, or its outputs or gradients are wrong."""

    status = "wrong"


def check_new_backends(
    kernels: KernelsConfig, attn: AttnConfig, device: torch.device, generates: bool = False
) -> dict[str, str]:
    """Return {op: the doctor's status} of each chosen backend that is not in SHIPPED: "ok: ...", or "unavailable: ...".

    The backend of decode counts only if the run `generates`. With kernels.check=false it checks nothing, and returns
    {}. Raises WrongKernel, which names the file, if such a backend is wrong, and KernelError if a check has no answer.
    """
    if not kernels.check:
        return {}
    chosen = impl_by_op(kernels, attn) | ({"decode": kernels.decode} if generates else {})
    chosen = {op: impl for op, impl in chosen.items() if impl not in SHIPPED.get(op, "").split()}
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
    """Return " norm(x, ...) -> (y, new_residual)" from the contract's docstring; "" if it has no such line."""
    lines = map(str.strip, (contract(op).__doc__ or "").splitlines())
    return next((f" {line}" for line in lines if line.startswith(f"{op}(") and " -> " in line), "")


def cache_key(op: str, impl: str, device: torch.device) -> str:
    """Return a hash of what decides the answer."""
    parts = [op, impl, device_name(device), torch.__version__]
    files = {path for folder in (ROOT, ROOT / op) for path in folder.glob("*.*") if path.is_file()}
    files |= {path for path in source_file(op, impl).parent.glob("*.py") if path.is_file()}
    texts = [path.name.encode() + b"\0" + read_bytes(path) for path in sorted(files)]
    return hashlib.sha256(b"\0".join([json.dumps(parts).encode(), *texts])).hexdigest()[:32]
