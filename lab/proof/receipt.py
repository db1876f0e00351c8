"""Profile a step: which kernels ran on the GPU, or which operators on a CPU.

Each kernel belongs to a family. A family has patterns of its kernels' names: each op has its own (FAMILY, see
kernels/registry.py), and this file has the patterns of all other kernels. torch.compile names a fused kernel after
everything in it, so several patterns may match, and the first one counts.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from data.loader import Batch
from kernels.registry import expected_kernels, family_patterns
from lab.proof.source_lines import kernel_lines
from model.gpt import GPT
from model.optim import Optimizer
from runtime.timing import synchronize, time_calls

Patterns = dict[str, tuple[str, ...]]  # family -> patterns
BEFORE_OPS: Patterns = {"optimizer": (r"multi_tensor|lpnorm|NormTwoOps|fused_adam|_adamw_kernel|_muon|_foreach",)}
AFTER_OPS: Patterns = {
    "gemm": (r"(?i)gemm|nvjet|cutlass|splitK|xmma|aten::(add)?b?mm",),
    "embedding": (r"embedding|grad_weight|scatter|gather|radix|segment|unique|cub::",),
    "copies and fills": (r"(?i)memcpy|memset|copy|fill|zero_|_cat|CatArray",),
    "elementwise and sums": (r"(?i)elementwise|reduce|triton_|fused|aten::(add|mul|div|sum|neg)",),
}
OTHER = "other"
MOST_KERNELS = 24  # of a receipt, in the row


def family_of(name: str, op_patterns: Patterns) -> str:
    """Return the family of a kernel. `op_patterns` are registry.family_patterns()."""
    for family, patterns in (BEFORE_OPS | op_patterns | AFTER_OPS).items():
        if any(re.search(pattern, name) for pattern in patterns):
            return family
    return OTHER


def profile_step(
    step: Callable[[], object],
    device: torch.device,
    op_patterns: Patterns,
    count: Callable[[], int] = lambda: 1,
) -> dict:
    """Profile step(). Return the milliseconds of its kernels: their sum, by family, and by name, longest first.

    After step(), count() returns how many decoding steps it made. The figures are divided by this number.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler of PyTorch 2.13 prints that it starts
    cuda, times, calls = device.type == "cuda", Counter(), Counter()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        step()
        synchronize(device)
    for event in profiler.events():
        if cuda and (event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False)):
            continue
        name = " ".join(event.name.split())
        times[name] += event.device_time if cuda else event.self_cpu_time_total
        calls[name] += 1
    families, kernels, steps = Counter(), [], count()
    for name, microseconds in times.most_common():
        family, ms = family_of(name, op_patterns), microseconds / 1e3 / steps
        families[family] += ms
        kernels.append({"name": name[:200], "family": family, "calls": calls[name] / steps, "ms": ms})
    return {"busy_ms": sum(families.values()), "families": dict(families.most_common()), "kernels": kernels}


def optimizer_ms(model: GPT, optimizer: Optimizer, batch: Batch) -> float:
    """Return the milliseconds of optimizer.step() after a backward: clipping and the update. It is a median of three.

    The learning rate is 0, so no weight changes. A GPU first sleeps for 0.2 s, so launches do not count, as in a CUDA
    graph. With launches, Muon's update of SmolLM2-135M took 10.4 ms and AdamW's 1.1, but Muon's step only 2.1 ms more.
    """
    times = []
    for _ in range(4):  # the first one is a warm-up
        loss = model(*batch)
        optimizer.backward(loss, last=True)
        seconds, _ = time_calls(partial(optimizer.step, 0.0, loss.detach()), 1, loss.device, sleep=0.2)
        times.append(1e3 * seconds)
    return median(times[1:])


def make_receipt(
    step: Callable[[], object],
    device: torch.device,
    impls: dict[str, str],
    described: dict[str, str],
    forward_only: bool = False,
    count: Callable[[], int] = lambda: 1,
) -> dict:
    """Profile step(), and return its kernels, for the backends in `impls`: op -> backend.

    `described` is op -> its backend in the row. `wrong` names an op that did not run as the row says. `unchecked` lists
    the ops whose backends name no kernels. `lines` is op -> its lines of kernel code, by kernel_lines(). A backend's
    first pattern is for the forward. With `forward_only` the others are left out. `count` is as in profile_step().
    """
    receipt = profile_step(step, device, family_patterns(impls), count)
    claims = {op: (described[op], expected_kernels(op, impl, described[op])) for op, impl in impls.items()}
    if forward_only:
        claims = {op: (description, patterns[:1]) for op, (description, patterns) in claims.items()}
    if device.type == "cpu" and "decode" in claims:  # a CPU's profile names operators, and a decoder's kernels are none
        claims["decode"] = described["decode"], ()
    wrong = missing_kernel(receipt, claims)
    unchecked = [op for op, (_, patterns) in claims.items() if not patterns]
    receipt["kernels"] = receipt["kernels"][:MOST_KERNELS]
    return {**receipt, "wrong": wrong, "unchecked": unchecked, "lines": kernel_lines(impls)}


def receipt_lines(row: dict) -> list[str]:
    """Return the row's receipt, and its memory by part, as lines for the terminal."""
    receipt, busy = row["receipt"], row["receipt"]["busy_ms"]
    shares = [f"{name} {100 * ms / busy:.0f}%" for name, ms in receipt["families"].items() if ms > busy / 100]
    lines = [f"receipt  {', '.join(shares)} of {busy:.4g} ms in kernels"]
    if ms := receipt.get("optimizer_ms"):
        lines[0] += f"; the optimizer's step takes {ms:.3g} ms"
    for side, parts in row["memory"].items():
        if parts:
            split = ", ".join(f"{name} {gib:.3g}" for name, gib in parts.items() if name != "peak")
            lines.append(f"memory   {side} {parts['peak']:.3g} GiB: {split}")
    return lines


def missing_kernel(receipt: dict, claims: dict[str, tuple[str, tuple[str, ...]]]) -> str | None:
    """Return one line about the first op that did not run the kernels of its backend; None if every op did.

    `claims` is op -> (the backend's description in the row, patterns). Each pattern must match the name of a kernel.
    """
    for op, (description, patterns) in claims.items():
        for pattern in patterns:
            if not any(re.search(pattern, kernel["name"]) for kernel in receipt["kernels"]):
                return f"the row says {op}={description}, but no kernel of the profiled step matches {pattern}"
    return None
