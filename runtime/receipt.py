"""What a step really ran: its kernels on the GPU (operators, on a CPU) by PyTorch's profiler, in families.

Names tell the family. What torch.compile fuses is named after all that is in it, and counts where the first of these
patterns finds it.
"""

import os
import re
from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from runtime.timing import synchronize

FAMILIES = {
    "optimizer": r"multi_tensor|lpnorm|NormTwoOps|fused_adam|_foreach",
    "loss": r"log_softmax|cross_entropy|nll_loss|cunn_SoftMax",
    "attention": r"(?i)flash|fmha|sdpa|attention|softmax|probabilities|cudnn::fusion|^_(fwd|dq|dkdv|combine|numbers)_k",
    "mlp": r"(?i)mlp|gelu",
    "norm": r"(?i)layer_?norm|_norm_|rmsnorm|quack|GammaBeta|column_sum",
    "gemm": r"(?i)gemm|nvjet|cutlass|splitK|xmma|aten::(add)?b?mm",
    "embedding": r"embedding|grad_weight|scatter|gather|radix|segment|unique|cub::",
    "copies and fills": r"(?i)memcpy|memset|copy|fill|zero_|_cat|CatArray",
    "elementwise and sums": r"(?i)elementwise|reduce|triton_|fused|aten::(add|mul|div|sum|neg)",
}
OTHER = "other"


def family(name: str) -> str:
    return next((family for family, pattern in FAMILIES.items() if re.search(pattern, name)), OTHER)


def receipt(step: Callable[[], object], device: torch.device) -> dict:
    """One profiled step: milliseconds of its kernels, in all (`busy_ms`), by family and by name, most time first."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler of PyTorch 2.13 prints that it starts
    cuda, times, calls = device.type == "cuda", Counter(), Counter()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as told:
        step()
        synchronize(device)
    for event in told.events():
        if cuda and (event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False)):
            continue
        name = " ".join(event.name.split())
        times[name] += event.device_time if cuda else event.self_cpu_time_total
        calls[name] += 1
    families = Counter()
    for name, microseconds in times.items():
        families[family(name)] += microseconds / 1e3
    kernels = [
        {"name": name[:200], "family": family(name), "calls": calls[name], "ms": microseconds / 1e3}
        for name, microseconds in times.most_common()
    ]
    return {"busy_ms": sum(families.values()), "families": dict(families.most_common()), "kernels": kernels}


def missing(found: dict, claims: dict[str, tuple[str, tuple[str, ...]]]) -> str | None:
    """Which op did not run what its row says: `claims` is op -> (who it should be, the patterns of its names)."""
    for op, who, pattern in ((op, who, pattern) for op, (who, patterns) in claims.items() for pattern in patterns):
        if not any(re.search(pattern, kernel["name"]) for kernel in found["kernels"]):
            return f"{op} is said to be {who}, and no kernel of the profiled step is called like {pattern}"
    return None
