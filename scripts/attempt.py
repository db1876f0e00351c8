"""One try of scripts/max_context.py: what it runs, within which memory, and what was predicted for it."""

import contextlib
import ctypes
import math
import os
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from kernels.registry import AttnConfig, KernelError, KernelsConfig
from model.generate import Decoder, Sampling, stream
from model.gpt import GPT, PRECISIONS, GPTConfig
from model.memory import nbytes, parts, simulated
from model.optim import OptimConfig, Optimizer
from runtime.config import check
from runtime.device import GIB, OutOfMemory, out_of_memory, peaks, reset_memory
from runtime.timing import synchronize
from train import build, train_step

MODES = ("train", "generate")
NEW_TOKENS = 64
STATUS = Path("/proc/self/status")
WINDOW = 4096  # of a try whose full attention would take too long


@dataclass
class Config:
    mode: str | None
    memory_gib: float | None
    probe_minutes: float
    probe: str | None
    length: int | None
    keep: bool
    out_dir: str | None
    seed: int
    device: str
    precision: str
    kernels: KernelsConfig
    attn: AttnConfig
    model: GPTConfig
    optim: OptimConfig

    # No keys, and what build() reads besides
    init_from, parallel, data = None, "ddp", SimpleNamespace(mask_documents=False)

    def __post_init__(self):
        check(self.mode in (None, *MODES), f"mode={self.mode}: choose {', '.join(MODES)}, or null for both")
        check(self.memory_gib is None or self.memory_gib > 0, f"memory_gib={self.memory_gib}: it must be above 0")
        check(self.probe_minutes > 0, f"probe_minutes={self.probe_minutes}: it must be above 0")
        check(self.probe in (None, "predict", "run"), f"probe={self.probe}: choose predict or run, or null to search")
        check(not self.probe or bool(self.mode), f"probe={self.probe} needs mode={' or mode='.join(MODES)}")
        check(self.probe != "run" or self.length is not None, "probe=run needs length=...")
        check(self.length is None or 1 <= self.length < 2**30, f"length={self.length}: it must be in [1, 2^30)")
        check(self.precision in PRECISIONS, f"precision={self.precision}: choose {', '.join(PRECISIONS)}")
        check(0 <= self.seed < 2**63, f"seed={self.seed}: it must be in [0, 2^63)")


def sized(cfg: Config, length: int) -> Config:
    """With a table for so many positions, where they are learned."""
    return replace(cfg, model=replace(cfg.model, block_size=length))


def trainer(cfg: Config, length: int, device: torch.device) -> tuple[GPT, Optimizer, tuple[Tensor, ...]]:
    """All that a training step takes; the batch is one sequence of random tokens."""
    model = build(sized(cfg, length), device)
    batch = torch.randint(cfg.model.vocab_size, (2, 1, length), device=device).unbind()
    return model, Optimizer(model, cfg.optim), batch


def generator(cfg: Config, length: int, device: torch.device) -> tuple[Decoder, Tensor]:
    """The decoder, and a prompt of random tokens."""
    model = build(sized(cfg, length + NEW_TOKENS), device).eval()
    how = Sampling(cfg.model.vocab_size, temperature=0)
    decoder = Decoder(model, 1, length + NEW_TOKENS, how, compiled=cfg.kernels.compile)
    return decoder, torch.randint(cfg.model.vocab_size, (1, length), device=device)


def train(cfg: Config, length: int, device: torch.device) -> dict[str, float]:
    """Two steps; the seconds are the second's."""
    model, optimizer, batch = trainer(cfg, length, device)
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        loss = train_step(model, optimizer, [batch], cfg.optim.learning_rate)[0].item()
        synchronize(device)
    return {"seconds": time.perf_counter() - start, "loss": loss}


def generate(cfg: Config, length: int, device: torch.device) -> dict[str, float]:
    """As scripts/generate.py does; the seconds are those of the second prefill and of all new tokens."""
    decoder, idx = generator(cfg, length, device)
    decoder.prefill(idx)
    decoder.warm_up(length + 1, length + NEW_TOKENS - 1)
    synchronize(device)
    start = time.perf_counter()
    arrivals = [time.perf_counter() - start for _ in stream(decoder, idx, NEW_TOKENS)]
    return {"seconds": arrivals[-1], "prefill_s": arrivals[0]}


def run(cfg: Config, length: int, device: torch.device) -> dict:
    """The row of one try: status ok or oom, the seconds of a step, peaks in GiB; on a CPU the process's growth."""
    row, work = {"T": length, "window": cfg.model.window, "status": "ok"}, train if cfg.mode == "train" else generate
    reset_memory(device)
    if device.type == "cpu":
        ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: else what is freed, up to 32 MiB, stays in the heap
        work(cfg, 64, device)  # code that comes from the disk is no memory of the step's
        torch.compiler.reset()  # else the next length is compiled for any length
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew; ru_maxrss has the parent's in it, too
        before = process("VmRSS")
    try:
        with limited(cfg.memory_gib, device), out_of_memory(f"T={length}", "T"):
            row |= work(cfg, length, device)
    except (OutOfMemory, MemoryError) as full:
        row |= {"status": "oom", "why": str(full)}
    if not math.isfinite(row.get("loss", 0.0)):
        row |= {"status": f"failed: the loss is {row.pop('loss')}"}
    found = peaks(device)
    peak = (process("VmHWM") - before) / GIB if device.type == "cpu" else found["mem/peak_allocated_gib"]
    return row | {"peak_gib": peak, "reserved_gib": found["mem/peak_reserved_gib"]}


def process(what: str) -> int:
    """Bytes of this process, by Linux's name for them."""
    return 1024 * int(re.search(rf"{what}:\s+(\d+) kB", STATUS.read_text())[1])


@contextlib.contextmanager
def limited(gib: float | None, device: torch.device) -> Iterator[None]:
    """Within it the program can have no more memory than that: on a GPU in all, on a CPU besides what it holds."""
    if device.type == "cuda":
        if gib:
            torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.mem_get_info()[1])
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (process("VmData") + int(gib * GIB), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def capacity(cfg: Config, device: torch.device) -> tuple[float, float]:
    """GiB of the device, or memory_gib, and how much of it can be had. UserError: there is no such limit."""
    gib = cfg.memory_gib
    if device.type == "cuda":
        free, total = (size / GIB for size in torch.cuda.mem_get_info())
        check(gib is None or gib <= total, f"memory_gib={gib}: this GPU has {total:.1f}")
        return gib or total, min(gib or total, free)
    check(gib is not None, "device=cpu: the search would fill the machine's memory; give memory_gib=...")
    check(STATUS.exists(), f"memory_gib={gib} on a CPU takes Linux, which can limit what a process holds")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    check(gib <= total, f"memory_gib={gib}: this machine has {total:.1f}")
    return gib, gib


def predict(cfg: Config, length: int, device: torch.device) -> dict:
    """What run() would hold, in GiB, by model/memory.py: weights, what belongs to the mode, and the peak.

    Of a model under torch.compile it is the uncompiled one's: what Inductor keeps and fuses is not known before.
    """
    cfg = replace(cfg, kernels=replace(cfg.kernels, compile=False))
    with simulated(device) as held:
        if cfg.mode == "generate":
            decoder, idx = generator(cfg, length, device)
            decoder.prefill(idx)
            decoder.step()
            found = {"weights": nbytes(decoder.model.parameters()), "kv_cache": nbytes(chain(*decoder.kv))}
            found["peak"] = held.peak
        else:
            model, optimizer, batch = made = trainer(cfg, length, device)
            found = parts(held, *made, lambda: train_step(model, optimizer, [batch], cfg.optim.learning_rate))
    return {"T": length, **{f"{part}_gib": size / GIB for part, size in found.items()}, "opaque": sorted(held.opaque)}


def slides(cfg: Config, device: torch.device) -> bool:
    """Whether attention with a window takes as much memory as without one, and not a T x T mask more."""
    pair = [replace(cfg, model=replace(cfg.model, window=window)) for window in (None, WINDOW)]
    try:
        full, windowed = (predict(each, 2 * WINDOW, device)["peak_gib"] for each in pair)
    except KernelError:  # it has none, or none that was measured
        return False
    return full == windowed
