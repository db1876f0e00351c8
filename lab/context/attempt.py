"""One attempt at a length: a real training step or generation of T tokens, or its prediction on fake tensors."""

import contextlib
import ctypes
import math
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.futures import Future

from common.files import read_text
from kernels.registry import KernelError
from kernels.sampling import Sampling
from lab.proof.memory import predict_generation, predict_parts, recipe_chunk
from lab.recipe import Recipe
from model.config import PRECISIONS
from model.decoder import CHUNK, Decoder, make_decoder
from model.generate import stream
from model.gpt import GPT
from model.optim import Optimizer
from model.parallel import prepare
from model.step import train_step
from runtime.config import check
from runtime.device import GIB, OutOfMemory, explain_out_of_memory, process_peaks, reset_peak_memory
from runtime.host_memory import free_memory, total_memory
from runtime.ranks import Ranks, world_size
from runtime.timing import synchronize

MODES = ("train", "generate")
NEW_TOKENS = 64
PROC_STATUS = Path("/proc/self/status")
WINDOW = 4096  # the sliding window of a shortened attempt in training
# On a CPU, allocations fail only at memory_gib + HEADROOM_GIB, and an attempt whose peak is above memory_gib counts as
# full: oneDNN and MKL do not check their own small allocations, and crashed at a limit of memory_gib
HEADROOM_GIB = 1.0
M_MMAP_THRESHOLD = -3  # glibc's number of the option, from malloc.h


def with_positions(recipe: Recipe, length: int) -> Recipe:
    """Return the recipe for sequences of `length` tokens. Learned positions need a table that long."""
    return replace(recipe, model=replace(recipe.model, block_size=length))


class SimulatedRanks(Ranks):
    """Rank 0 of several simulated ranks. It sends nothing, and allocates the memory that the communication takes."""

    def sum(self, value: Tensor) -> Tensor:
        return value

    def exchange(self, parts: Tensor) -> Tensor:
        return parts.clone(memory_format=torch.contiguous_format)  # the received tensor

    def start_average(self, tensor: Tensor) -> Future:
        average = Future()
        average.set_result(tensor)
        return average


def build_trainer(
    recipe: Recipe, length: int, device: torch.device, ranks: Ranks
) -> tuple[GPT, Optimizer, list[tuple[Tensor, ...]]]:
    """Return the arguments of a training step: model, optimizer, and the micro-batches.

    There is one micro-batch, with one sequence of random tokens. Several ranks split the sequence.
    """
    model = with_positions(recipe, length).build(device)
    prepare(model, "context", recipe.kernels, recipe.seed, ranks)
    batch = torch.randint(recipe.model.vocab_size, (2, 1, length), device=device).unbind()
    return model, recipe.make_optimizer(model, ranks), [batch]


def build_decoder(recipe: Recipe, length: int, device: torch.device) -> tuple[Decoder, Tensor]:
    """Return the decoder, and a prompt of random tokens."""
    model = with_positions(recipe, length + NEW_TOKENS).build(device).eval()
    sampling = Sampling(recipe.model.vocab_size, temperature=0)
    options = recipe.kernels.decoder_options | {"options": recipe.generate}
    decoder = make_decoder(model, 1, length + NEW_TOKENS, sampling, **options)
    return decoder, torch.randint(recipe.model.vocab_size, (1, length), device=device)


def train(recipe: Recipe, length: int, device: torch.device, ranks: Ranks) -> dict[str, float]:
    """Run two training steps. Return the seconds of the second one, and its loss."""
    model, optimizer, batches = build_trainer(recipe, length, device, ranks)
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        loss = train_step(model, optimizer, batches, recipe.optim.learning_rate)[0].item()
        synchronize(device)
    return {"seconds": time.perf_counter() - start, "loss": loss}


def generate(recipe: Recipe, length: int, device: torch.device, kept: int = 0) -> dict[str, float]:
    """Prefill `length` tokens and generate NEW_TOKENS, after a warm-up of both.

    The first `kept` tokens count as cached. With `kept`, the prefill has no warm-up, because its time says nothing
    about the whole prompt. Return `seconds` to the last new token, and `prefill_s` to the first.
    """
    decoder, idx = build_decoder(recipe, length, device)
    decoder.warm_up(length, NEW_TOKENS)
    if not kept:
        decoder.prefill(idx)
    synchronize(device)
    start = time.perf_counter()
    arrivals = [time.perf_counter() - start for _ in stream(decoder, idx, NEW_TOKENS, kept=kept)]
    return {"seconds": arrivals[-1], "prefill_s": arrivals[0]}


def tokens_before_last_chunks(length: int) -> int:
    """Return how many tokens of a prompt come before its last chunks, which take as much memory as the whole prompt.

    The last chunks are three whole ones and an incomplete one. With two whole ones, the prediction was 640 bytes low.
    """
    return max(0, (length // CHUNK - 3) * CHUNK)


def run_attempt(
    recipe: Recipe,
    mode: str,
    length: int,
    memory_gib: float | None,
    device: torch.device,
    shortened: bool = False,
    ranks: Ranks | None = None,
) -> dict:
    """Return the row of one attempt: status, seconds, and peaks in GiB (on a CPU, the growth of the process).

    Several ranks split the sequence of a training step. The row has the largest peaks, and in `room_gib` the smallest
    allocator_room(). On several ranks, full memory raises an error, because the other ranks would wait forever.

    A shortened attempt takes the same memory in less time: training has a window of WINDOW tokens (the search checks
    window_is_free() first), and generation computes only the last chunks of the prompt. Its new tokens still read the
    whole cache.
    """
    row, ranks = {"T": length, "shortened": shortened, "status": "ok"}, ranks or Ranks()
    if mode == "train":
        work, options = partial(train, ranks=ranks), {}
        if shortened:
            recipe = replace(recipe, model=replace(recipe.model, window=WINDOW))
        row["window"] = recipe.model.window
    else:
        work, options = generate, {"kept": tokens_before_last_chunks(length) if shortened else 0}
        row["computed"] = length - options["kept"]
    reset_peak_memory(device)
    if device.type == "cpu":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # by default the heap keeps up to 32 MiB of freed memory
        work(recipe, 64, device)  # loads code, whose memory does not count as the step's
        torch.compiler.reset()  # otherwise the next length would be compiled for all lengths
        with contextlib.suppress(OSError):
            # resets VmHWM; ru_maxrss includes the parent process's peak
            Path("/proc/self/clear_refs").write_bytes(b"5")
        before = process_bytes("VmRSS")
    try:
        with limit_memory(memory_gib, device), explain_out_of_memory(f"T={length}", "T"):
            row |= work(recipe, length, device, **options)
    except (OutOfMemory, MemoryError) as full:
        if not ranks.single:
            raise
        row |= {"status": "oom", "why": str(full)}
    if not math.isfinite(row.get("loss", 0.0)):
        row["status"] = f"failed: the loss is {row.pop('loss')}"
    peaks = process_peaks(device)
    peak = (process_bytes("VmHWM") - before) / GIB if device.type == "cpu" else peaks["mem/peak_allocated_gib"]
    if not ranks.single and device.type == "cuda":
        row["room_gib"] = -ranks.max_over_ranks(-allocator_room(device))[0]
    peak, reserved = ranks.max_over_ranks(peak, peaks["mem/peak_reserved_gib"] or 0.0)
    # A GPU's allocator keeps to the limit, but not that of another library, whose peak counts, too
    if row["status"] == "ok" and memory_gib is not None and peak > memory_gib:
        row |= {"status": "oom", "why": f"T={length} takes more than memory_gib={memory_gib:g}"}
    return row | {"peak_gib": peak, "reserved_gib": reserved or None}


def allocator_room(device: torch.device) -> float:
    """Return the GiB that PyTorch's allocator holds or could still get. The CUDA context and NCCL hold the others."""
    return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) / GIB


def process_bytes(name: str) -> int:
    """Return a size of this process in bytes; `name` is Linux's name of the size, such as VmRSS."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", read_text(PROC_STATUS))[1])


@contextlib.contextmanager
def limit_memory(gib: float | None, device: torch.device) -> Iterator[None]:
    """Limit what this process can allocate: on a GPU to `gib`, on a CPU to `gib` + HEADROOM_GIB above what it has."""
    if device.type == "cuda":
        if gib:
            torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.mem_get_info()[1])
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (process_bytes("VmData") + int((gib + HEADROOM_GIB) * GIB), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def host_tokens(recipe: Recipe, device: torch.device) -> int | None:
    """Return for how many tokens the host's free memory can hold the inputs of all blocks; None if they stay elsewhere.

    5% stay free, because a system with a full memory kills the process without a word. All ranks are on one host.
    """
    checkpointing, layers, ranks = recipe.model.checkpointing, recipe.model.n_layer, world_size()
    if checkpointing not in ("host", "chunks") or device.type == "cpu":
        return None
    available = free_memory()
    token_bytes = recipe.model.n_embd * PRECISIONS[recipe.precision][0].itemsize
    if checkpointing == "chunks":  # the backward of a block also keeps a gradient of its input there
        return int(0.95 * available) // ((layers + 1) * token_bytes)
    input_bytes = int(0.95 * available) // (layers * ranks)
    input_bytes = 2 ** (input_bytes.bit_length() - 1)  # PyTorch allocates pinned memory in powers of two
    return ranks * (input_bytes // token_bytes)


def memory_limits(memory_gib: float | None, device: torch.device) -> tuple[float, float]:
    """Return (the limit in GiB, how much of it is free). The limit is memory_gib, or all of the GPU.

    Raises UserError if memory_gib exceeds the device's memory. On a CPU also if it is None, or without Linux.
    """
    if device.type == "cuda":
        free, total = (size / GIB for size in torch.cuda.mem_get_info())
        check(memory_gib is None or memory_gib <= total, f"memory_gib={memory_gib}: this GPU has {total:.1f} GiB")
        limit = memory_gib or total
        return limit, min(limit, free)
    check(memory_gib is not None, "device=cpu: the search would fill the machine's memory; give memory_gib=...")
    check(PROC_STATUS.exists(), f"memory_gib={memory_gib} on a CPU needs Linux, which can limit a process's memory")
    total = total_memory() / GIB
    check(memory_gib <= total, f"memory_gib={memory_gib}: this machine or container has {total:.1f} GiB")
    return memory_gib, memory_gib


def predict(recipe: Recipe, mode: str, length: int, device: torch.device) -> dict:
    """Predict the GiB that run_attempt() would take: the weights, the mode's other parts, and the peak.

    `opaque` names the ops that hide memory from the prediction, which sees only what their fakes allocate. For every
    decoder, the prediction is for blocks, because all share the prefill, which takes more than a step. It leaves out
    copies of the weights by pack().
    """
    if mode == "generate":
        groups = with_positions(recipe, length + NEW_TOKENS).groups
        kept = tokens_before_last_chunks(length)  # all 246 chunks of 4 million tokens took 25 s, and the last 0.3 s
        parts, opaque = predict_generation(groups, recipe.generate, (1, length), NEW_TOKENS, device, kept)
    else:
        start = partial(build_trainer, device=device, ranks=SimulatedRanks(0, world_size()))
        parts, opaque = predict_parts(recipe, device, start, length, world_size() * recipe_chunk(recipe, 1))
    return {"T": length, **{f"{part}_gib": size / GIB for part, size in parts.items()}, "opaque": sorted(opaque)}


def window_is_free(recipe: Recipe, device: torch.device) -> bool:
    """Return whether attention takes the same memory in training with a window and without: it writes no T x T mask."""
    peaks = []
    for window in (None, WINDOW):
        windowed = replace(recipe, model=replace(recipe.model, window=window))
        try:
            peaks.append(predict(windowed, "train", 2 * WINDOW, device)["peak_gib"])
        except KernelError:  # this attention has no window, or attn=auto has no measurement with a window
            return False
    return peaks[0] == peaks[1]
