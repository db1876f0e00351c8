"""The machine: which device, what it can do at most, how much memory it took, and what to write beside a figure."""

import gc
import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from runtime.config import UserError, check
from runtime.ranks import Ranks
from runtime.timing import measured_flops

GIB = 2**30

# Memory that grows in place, unless the user chose: in segments of fixed sizes, PyTorch's default, eager GPT-2 124M at
# T = 146,432 took 139 GiB of an H200 for 113 of tensors, and at 147,456 found no place. Read when a GPU is first used.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


class OutOfMemory(UserError):
    """The device's memory is not enough; the message says what was tried and what to lower."""

    status = "oom"  # the word in a result row


ROOT = Path(__file__).parent.parent

# Dense bf16 tensor-core peaks with fp32 accumulation, FLOP/s, from the vendor's data sheets (without sparsity), by
# PyTorch's whole device name: a MIG slice, a laptop or an NVL card has another chip behind much the same name, and an
# unknown GPU has no peak, never a guess.
BF16_PEAK = {
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
}


def pick(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`. UserError: it does not exist here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    check(
        name == "cpu" or (kind == "cuda" and (not index or index.isdigit())),
        f"device={name}: choose auto, cpu, cuda or cuda:N",
    )
    if kind == "cuda":
        if not torch.cuda.is_available():
            why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch sees no GPU"
            raise UserError(f"device={name}: {why} (torch {torch.__version__}); use device=cpu, or device=auto")
        count = torch.cuda.device_count()
        check(int(index or 0) < count, f"device={name}: this machine has {count} GPU(s), numbered from 0")
        torch.cuda.set_device(int(index or 0))
    return torch.device(name)


def name(device: torch.device) -> str:
    """ "NVIDIA H200", or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


class Ceiling:
    """What a device could do at most, FLOP/s, and how much of that the job's throughput is on all of its devices."""

    def __init__(self, device: torch.device, dtype: torch.dtype, flops_per_token: float, devices: int = 1):
        self.flops_per_token, self.devices = flops_per_token, devices
        self.peak, self.measured = BF16_PEAK.get(name(device)), measured_flops(device, dtype)

    def figures(self, tokens_per_sec: float | None) -> dict[str, float | None]:
        """Throughput and model FLOP utilisation, against the data sheet and against the matmul measured here."""
        each = tokens_per_sec and tokens_per_sec / self.devices
        rate = each and each * self.flops_per_token
        return {
            "perf/tokens_per_sec": tokens_per_sec,
            "perf/tokens_per_sec_per_device": each,
            "perf/mfu": rate / self.peak if rate and self.peak else None,
            "perf/mfu_measured_peak": rate / self.measured if rate else None,
        }


def memory(device: torch.device, ranks: Ranks) -> dict[str, float | int | None]:
    """Peak memory since reset_memory(), GiB: the allocator's on a GPU, the process's resident set on a CPU.

    Of several ranks the largest of each figure, and `mem/job_peak_gib`, the sum over all of them.
    """
    each = ranks.gather(peaks(device))
    most = {key: None if value is None else max(peak[key] for peak in each) for key, value in each[0].items()}
    total = sum(peak["mem/peak_allocated_gib"] or peak["mem/peak_rss_gib"] for peak in each)
    return most | ({} if ranks.alone else {"mem/job_peak_gib": total})


def peaks(device: torch.device) -> dict[str, float | int | None]:
    """This process's."""
    if device.type == "cuda":
        return {
            "mem/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "mem/peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "mem/alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
        }
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss is in KiB on Linux
    return {
        "mem/peak_allocated_gib": None,
        "mem/peak_reserved_gib": None,
        "mem/alloc_retries": None,
        "mem/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB,
    }


def reset_memory(device: torch.device) -> None:
    """Forget the peak so far, and what is only cached (a CPU process cannot)."""
    if device.type == "cuda":
        gc.collect()  # what an error's traceback holds goes now, and not in the middle of a measurement
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def out_of_memory(tried: str, lower: str, hint: Callable[[], str] = str) -> Iterator[None]:
    """Makes PyTorch's errors of a full memory an OutOfMemory: one line that says what was tried and what to lower.

    `hint` is asked only then for what else there is to say; by default nothing.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's is told by its text alone
        gpu = isinstance(error, torch.OutOfMemoryError)
        if not gpu and "DefaultCPUAllocator" not in str(error):
            raise
        what = re.search(r"[Tt]ried to allocate .*?(?=\. |$)(\. GPU .*?(?=\. |$))?", str(error))
        raise OutOfMemory(
            f"out of {'GPU ' if gpu else ''}memory with {tried}: {what[0] if what else error}; lower {lower}{hint()}"
        ) from error


def environment(device: torch.device) -> dict[str, str | int | None]:
    """What a figure depends on besides the config."""
    cuda = device.type == "cuda"
    return {
        "device": name(device),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if cuda else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "git_commit": git_commit(),
    }


def git_commit() -> str | None:
    """ "<sha>" or "<sha>-dirty"; a copy of the tree without its history is told by the variable HOTSWAP_COMMIT."""
    if told := os.environ.get("HOTSWAP_COMMIT"):
        return told
    if not (ROOT / ".git").exists():  # else the commit would be that of a repo around this folder
        return None
    return _output("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _output(*command: str) -> str | None:
    """The first line that a command prints in the repo's root; None where it is missing, fails or takes 10 s."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None
