"""Training steps that are replayed from a CUDA graph.

A step of GPT-2 124M is some 1,000 kernels. Launching them takes an H200's host some 40 ms, in fp8 90 ms, and with 16
sequences or fewer the GPU waits for it. A CUDA graph launches all of them with one call: forward, backward, clipping
and AdamW. A number of the host would keep its value in all replays. So everything that changes is on the device: the
batch and the learning rate, which each call fills, and the optimizer's counters.

A graph keeps the memory that a step needs besides weights and optimizer state. An evaluation cannot use it.
"""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from data.loader import Batch
from kernels.registry import other_runtimes
from model.config import GPTConfig
from model.gpt import GPT
from model.optim import Optimizer
from model.step import train_step
from runtime.config import UserError, check
from runtime.torch_compat import copy_tensors

UNCAPTURED_STEPS = 2  # the first compiles kernels and allocates moments; the second is checked for synchronisations
MAX_MEMORY_SHARE = 0.8  # of the GPU: a larger step is not captured, because an evaluation needs memory of its own


class StepRunner:
    """step(batches, lr) makes one optimizer step, as train_step() does: (mean loss, gradient norm) on the device.

    From the third call on it replays a CUDA graph, and the next call overwrites the two results. `why_not` says why
    steps are not captured; it is None while they are or may still be. `wanted` is the config's train.cuda_graph: false
    never captures, null captures unless there is a reason against it, and true then raises UserError. All calls take
    batches of one shape. Raises UserError if the capture fails.
    """

    def __init__(self, model: GPT, optimizer: Optimizer, wanted: bool | None):
        self.model, self.optimizer, self.wanted = model, optimizer, wanted
        self.device = optimizer.lr.device
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.why_not: str | None = None
        if wanted is False:
            self._set_why_not("train.cuda_graph=false")
        else:
            others = other_runtimes(model.ops._asdict())
            self._set_why_not(reason_against(model.config, self.device) or next(iter(others.values()), None))

    def __call__(self, batches: list[Batch], lr: float) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls == UNCAPTURED_STEPS and not self.why_not:
            with watch_for_syncs() as syncs:
                results = train_step(self.model, self.optimizer, batches, lr)
            self._set_why_not(syncs[0] if syncs else reason_against_size(self.device))
            return results
        if self.why_not or self.calls < UNCAPTURED_STEPS:
            return train_step(self.model, self.optimizer, batches, lr)
        self.optimizer.wait_until_copied()
        if self.graph is None:
            self._capture(batches, lr)
        self.lr.fill_(lr)
        copy_tensors([t for batch in self.batches for t in batch], [t for batch in batches for t in batch])
        self.graph.replay()
        return self.results

    @property
    def figures(self) -> dict[str, str]:
        """The row's figure: whether steps were captured, and why not."""
        return {"cuda_graph": "captured" if self.graph else self.why_not or "the run was too short"}

    def release(self) -> None:
        """Free the graph and its memory. Later calls are not captured."""
        self.graph = self.results = self.batches = None
        self.why_not = self.why_not or "released"

    def _set_why_not(self, reason: str | None) -> None:
        check(not (self.wanted and reason), f"train.cuda_graph=true is impossible: {reason}; pass null or false")
        self.why_not = reason

    def _capture(self, batches: list[Batch], lr: float) -> None:
        self.batches = [tuple(tensor.clone() for tensor in batch) for batch in batches]
        self.lr = torch.full((), lr, device=self.device)
        # Helion's first call leaves its arguments in a reference cycle, which keeps the first step's autograd graph
        # alive. The AccumulateGrad nodes of that graph run on the first step's stream, which is not captured
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread's calls are restricted: the loader's thread allocates pinned memory
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.results = train_step(self.model, self.optimizer, self.batches, self.lr)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # raised at the end of the capture; its context is what ended the capture
            reason = str(error.__context__ or error).partition("\n")[0]
            raise UserError(f"a CUDA graph cannot contain this step: {reason}; pass train.cuda_graph=false") from error
        self.graph = graph
        if not self.optimizer.ranks.single:
            self.optimizer.ranks.at_exit.callback(self.release)


def reason_against(config: GPTConfig, device: torch.device) -> str | None:
    """Return why a step of this model cannot be captured; None if it may be."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if config.checkpointing in ("host", "chunks"):
        return f"model.checkpointing={config.checkpointing} allocates host memory in each step"
    if config.checkpointing == "block" and config.dropout:
        return "model.checkpointing=block with model.dropout reads the state of the random numbers in each step"
    return None


def reason_against_size(device: torch.device) -> str | None:
    """Return a reason against capturing if the steps so far took so much memory that an evaluation may not fit."""
    share = torch.cuda.max_memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory
    if share <= MAX_MEMORY_SHARE:
        return None
    return f"a step takes {share:.0%} of the GPU's memory, and a graph would keep it (limit {MAX_MEMORY_SHARE:.0%})"


@contextmanager
def watch_for_syncs() -> Iterator[list[str]]:
    """Yield a list. When the context ends, it has a line for each place where the host waited for the GPU."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = (warning for warning in caught if "called a synchronizing" in str(warning.message))
    found += [f"{sync.filename}:{sync.lineno} waits for the GPU" for sync in syncs]
