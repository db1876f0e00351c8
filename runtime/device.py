"""The machine: the device, its peak speed, the memory that a run took, and the environment of a figure."""

import gc
import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from common.files import read_text
from common.memory import OTHER_PEAKS
from runtime.config import UserError, check, value_text
from runtime.ranks import Ranks
from runtime.timing import measured_flops

GIB = 2**30
ROOT = Path(__file__).parent.parent
LONGEST_STEP = 10.0  # seconds of matmuls. If there is no GPU, device=auto refuses a longer step

# Let segments of GPU memory grow, unless the user has set the allocator. By default their sizes are fixed: eager GPT-2
# 124M at T = 146,432 then reserved 139 GiB of an H200 for 113 GiB of tensors, and ran out of memory at T = 147,456.
# And let 8 threads pin host memory: 0.13 s a GiB instead of 0.40. PyTorch reads the variable when it first uses a GPU
ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


class OutOfMemory(UserError):
    """The device's memory is full. The message says what was tried and what to lower."""

    status = "oom"  # the word in a result row


# Dense bf16 tensor-core peaks with fp32 accumulation, FLOP/s, from the vendor's data sheets (without sparsity). The key
# is PyTorch's whole device name, because a MIG slice, a laptop GPU or an NVL card has a similar name and another peak.
# An unknown GPU has no peak: nothing is guessed
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


def select_device(name: str) -> torch.device:
    """Return find_device(name), and set the allocator and the precision of matmuls for the whole process.

    Our programs call it, the package hotswap does not. fp32 uses no TF32, because fp32 is the reference of parity.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOCATOR)
    torch.set_float32_matmul_precision("highest")
    device = find_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device


def find_device(name: str | torch.device) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`. Raises UserError if this machine does not have it."""
    name = value_text(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    is_device = name == "cpu" or (kind == "cuda" and (not index or index.isdigit()))
    check(is_device, f"device={name}: choose auto, cpu, cuda or cuda:N")
    if kind == "cuda":
        if not torch.cuda.is_available():
            reason = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch sees no GPU"
            raise UserError(f"device={name}: {reason} (torch {torch.__version__}); use device=cpu, or device=auto")
        count = torch.cuda.device_count()
        check(int(index or 0) < count, f"device={name}: this machine has {count} GPU(s), numbered from 0")
        if index:
            torch.cuda.set_device(int(index))  # Triton launches kernels on the current GPU
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, such as "NVIDIA H200", or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", read_text(cpuinfo)) if cpuinfo.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def peak_flops(device: torch.device) -> float | None:
    """Return the bf16 FLOP/s of the data sheet; None for an unknown GPU or a CPU."""
    return BF16_PEAK.get(device_name(device))


class Ceiling:
    """The peak FLOP/s of one of `devices` devices: `peak` by its data sheet or None, and `measured` with a matmul."""

    def __init__(self, device: torch.device, dtype: torch.dtype, flops_per_token: float, devices: int = 1):
        self.flops_per_token, self.devices = flops_per_token, devices
        self.peak, self.measured = peak_flops(device), measured_flops(device, dtype)

    def figures(self, tokens_per_sec: float | None) -> dict[str, float | None]:
        """Return the throughput of the job and its model FLOP utilisation, or None for each without a throughput."""
        if tokens_per_sec is None:
            keys = ("tokens_per_sec", "tokens_per_sec_per_device", "mfu", "mfu_measured_peak")
            return {f"perf/{key}": None for key in keys}
        per_device = tokens_per_sec / self.devices
        flops = per_device * self.flops_per_token
        return {
            "perf/tokens_per_sec": tokens_per_sec,
            "perf/tokens_per_sec_per_device": per_device,
            "perf/mfu": flops / self.peak if self.peak else None,
            "perf/mfu_measured_peak": flops / self.measured,
        }


def check_step(asked: str, tokens: int, device: torch.device, **speed) -> None:
    """Raise UserError if `asked` is auto, it chose the CPU, and a step's matmuls take more than LONGEST_STEP."""
    if asked != "auto" or device.type != "cpu":
        return
    ceiling = Ceiling(device, **speed)
    seconds = ceiling.flops_per_token * tokens / ceiling.devices / ceiling.measured
    check(
        seconds <= LONGEST_STEP,
        f"PyTorch sees no GPU, and a step of {tokens:,} tokens takes at least {seconds:.0f} s on this CPU: try "
        "python train.py +experiment=smoke, or pass device=cpu to train this model all the same",
    )


def peak_memory(device: torch.device, ranks: Ranks) -> dict[str, float | int | None]:
    """Return process_peaks(); for several ranks their maxima, and the sum of the peaks as `mem/job_peak_gib`."""
    peaks = ranks.gather(process_peaks(device))
    figures = {key: None if value is None else max(peak[key] for peak in peaks) for key, value in peaks[0].items()}
    if not ranks.single:
        totals = [peak["mem/peak_allocated_gib"] or peak["mem/peak_rss_gib"] for peak in peaks]
        figures["mem/job_peak_gib"] = sum(totals)
    return figures


def process_peaks(device: torch.device) -> dict[str, float | int | None]:
    """Return this process's peak memory in GiB: PyTorch's since reset_peak_memory(), or the resident set on a CPU.

    The peak of another library, such as XLA, is added. It is since the start of the process, and perhaps of another
    moment than PyTorch's, so the sum may be too high, and is never too low.
    """
    if device.type == "cuda":
        others = sum(peak(device) for peak in OTHER_PEAKS.values())
        return {
            "mem/peak_allocated_gib": (torch.cuda.max_memory_allocated(device) + others) / GIB,
            "mem/peak_reserved_gib": (torch.cuda.max_memory_reserved(device) + others) / GIB,
            "mem/alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
        }
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss is in KiB on Linux
    return {
        **dict.fromkeys(("mem/peak_allocated_gib", "mem/peak_reserved_gib", "mem/alloc_retries")),
        "mem/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB,
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of a GPU's memory, and empty the allocator's cache. The peak of a CPU process cannot be reset."""
    if device.type == "cuda":
        gc.collect()  # frees the tensors in the traceback of an earlier error now, and not during a measurement
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error says that the memory is full. On a CPU, and for XLA, only the text says so."""
    texts = "DefaultCPUAllocator", "RESOURCE_EXHAUSTED"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)


@contextmanager
def explain_out_of_memory(tried: str, lower: str) -> Iterator[None]:
    """Turn out-of-memory errors of PyTorch and XLA into OutOfMemory: one line with what was tried and what to lower."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        match = re.search(r"[Tt]ried to allocate .*?(?=\. |$)(\. GPU .*?(?=\. |$))?", str(error))
        memory = "GPU memory" if isinstance(error, torch.OutOfMemoryError) else "memory"
        reason = match[0] if match else next(iter(str(error).splitlines()), "")
        raise OutOfMemory(f"out of {memory} with {tried}: {reason.rstrip('.')}; lower {lower}") from error


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Return the hardware and the versions, on which a figure depends."""
    cuda = device.type == "cuda"
    return {
        "device": device_name(device),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if cuda else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")[0] if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **git_commit(),
    }


def git_commit() -> dict[str, str | None]:
    """Return `git_commit`, "<sha>" or "<sha>-dirty" or the variable HOTSWAP_COMMIT; if None, also why it is unknown."""
    if commit := os.environ.get("HOTSWAP_COMMIT"):
        return {"git_commit": commit}
    if not (ROOT / ".git").exists():  # git would use a repo in a parent folder
        why = "the repo's folder has no .git: HOTSWAP_COMMIT=SHA names the commit of a copy"
        return {"git_commit": None, "git_commit_missing": why}
    line, why = _first_line("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return {"git_commit": line} if line else {"git_commit": None, "git_commit_missing": why}


def _first_line(*command: str) -> tuple[str | None, str | None]:
    """Return (the first line that a command prints in the repo's root, None), or (None, why there is none in 10 s)."""
    try:
        options = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
        result = subprocess.run(command, cwd=ROOT, timeout=10, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{command[0]} failed: {error}"
    if result.returncode == 0 and result.stdout:
        return result.stdout.splitlines()[0], None
    why = result.stderr.splitlines() or [f"exit code {result.returncode}"]
    return None, f"{command[0]} failed: {why[0]}"
