"""Prepare a built model for training: torch.compile, and several processes with DDP, FSDP2 or split sequences.

Under DDP (Li et al. 2020, arXiv:2006.15704) each rank holds all weights, and the ranks average the gradients of a block
while the backward of the block before it runs. PyTorch's DDP averages gradients in the dtype of the weights. The class
here averages the optimizer's sums, which are in fp32.

Under FSDP (Zhao et al. 2023, arXiv:2304.11277) each rank holds some rows of each weight. While a block runs, the
weights of the next block are gathered. After the block's forward its weights are freed, and the backward gathers them
again. With "zero2", after ZeRO stage 2 (Rajbhandari et al. 2020, arXiv:1910.02054), they stay until its backward. On
two H100s a step of 1558M with 8 sequences a GPU then takes 195 ms instead of 203, and 28.1 GiB instead of 25.3.

With "context", each rank holds all weights, as under DDP, and a part of each sequence (model/context.py).
"""

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Work

from common.terminal import warn
from kernels.compat import inductor_options
from kernels.registry import KernelsConfig
from model.config import GPTConfig
from model.context import split_sequences
from model.gpt import GPT
from runtime.config import check
from runtime.ranks import Ranks, world_size
from runtime.schedule import TrainConfig

PARALLEL = ("ddp", "fsdp", "zero2", "context")
SHARDED = ("fsdp", "zero2")  # each rank holds a part of each weight
BUCKET = 2**22  # weights of a bucket, or more: 16 MiB of gradients in fp32


def divide_work(parallel: str, model: GPTConfig, train: TrainConfig) -> None:
    """Divide a step, and with parallel=context each sequence, among the processes. Raises UserError if that fails."""
    check(parallel in PARALLEL, f"parallel={parallel}: choose {', '.join(PARALLEL)}")
    if parallel == "context":
        check_context_divides(model, **{"train.block_size": train.block_size})
    train.divide_step(parallel)


def check_context_divides(model: GPTConfig, **lengths: int) -> None:
    """Raise UserError if heads, or these lengths of sequences, do not divide among the processes."""
    for key, size in {"model.n_head": model.n_head, "model.n_kv_head": model.kv_heads, **lengths}.items():
        check(
            size % world_size() == 0,
            f"parallel=context divides {key}={size} among {world_size()} processes: choose a multiple of "
            f"{world_size()}, or another number of processes",
        )


def warn_of_one_process(parallel: str, ranks: Ranks) -> None:
    """Warn if `parallel` asks for several processes, and there is one."""
    if ranks.single and parallel != "ddp":  # the default
        advice = "torchrun --standalone --nproc_per_node=2 train.py starts two"
        warn(f"parallel={parallel} has no effect, because this job has one process; {advice}")


def prepare(model: GPT, parallel: str, kernels: KernelsConfig, seed: int, ranks: Ranks) -> GPT:
    """Split sequences or shard the model, as `parallel` says, compile it if `kernels` does, and return it, in place.

    It seeds the process: each rank draws its own dropout, from other random numbers than the initial weights.
    """
    torch.manual_seed(int(np.random.SeedSequence([seed, 1 + ranks.rank]).generate_state(1, np.uint64)[0]))
    if parallel == "context" and not ranks.single:
        split_sequences(model, ranks)
    if kernels.compile:
        compile_parts(model, kernels.compile_mode, ranks)
    if parallel in SHARDED and not ranks.single:
        shard(model, ranks, keep_gathered=parallel == "zero2")
    return model


def compile_parts(model: GPT, mode: str, ranks: Ranks) -> None:
    """Compile the whole model; for several ranks compile each block separately, and the end with the loss.

    The backward of a compiled function returns all its gradients at its end, and the ranks average them block by block.
    Also, torch.compile cannot trace FSDP's gathering.
    """
    options = inductor_options(mode)
    if ranks.single:
        model.compile(fullgraph=True, options=options)
        return
    for block in model.h:
        block.forward = torch.compile(block.forward, fullgraph=True, options=options)
    model.head_loss = torch.compile(model.head_loss, fullgraph=True, options=options)


def shard(model: GPT, ranks: Ranks, keep_gathered: bool) -> None:
    """Shard the model over the ranks, in place. With `keep_gathered`, a block's weights stay until its backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # with DTensor it takes 1.5 s to import

    # A block may return a view. The warning is about writing to it in place, which nothing here does
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(model.wte.weight.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients of bf16 weights are summed in fp32
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class Averaging:
    """Averages gradients over the ranks in buckets, which are lists of indices of weights.

    When a backward has computed the last gradient of a bucket, flatten(bucket) returns the tensor to average.
    """

    def __init__(self, weights: list[Tensor], ranks: Ranks, flatten: Callable[[list[int]], Tensor]):
        self.ranks, self.flatten = ranks, flatten
        self.buckets = make_buckets(weights)
        self.missing: list[int] = []  # for each bucket, how many gradients it still waits for
        self.averages: list[Work] = []  # of the first buckets, which are complete
        for number, bucket in enumerate(self.buckets):
            for i in bucket:
                weights[i].register_post_accumulate_grad_hook(partial(self._count_gradient, number))

    def begin(self) -> None:
        """Average the buckets in the next backward."""
        self.missing = [len(bucket) for bucket in self.buckets]

    def wait(self) -> None:
        """Let the device wait for the averages."""
        assert len(self.averages) == len(self.buckets)
        for average in self.averages:
            average.wait()
        self.missing, self.averages = [], []

    @torch.no_grad()
    def _count_gradient(self, number: int, weight: Tensor) -> None:
        """The hook of a weight in bucket `number`."""
        if not self.missing:
            return
        self.missing[number] -= 1
        # In the order of the buckets, because every rank must start the same averages in the same order
        while len(self.averages) < len(self.buckets) and not self.missing[len(self.averages)]:
            flat = self.flatten(self.buckets[len(self.averages)])
            self.averages.append(self.ranks.start_average(flat))


def make_buckets(weights: list[Tensor]) -> list[list[int]]:
    """Return the buckets, roughly in the order in which a backward completes them.

    The vectors are the last bucket, because FlatAdamW's buffers hold them behind the matrices.
    """
    vectors = [i for i, weight in enumerate(weights) if weight.dim() < 2]
    buckets, size = [], BUCKET
    for i in reversed([i for i, weight in enumerate(weights) if weight.dim() >= 2]):
        if size >= BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += weights[i].numel()
    return [*buckets, vectors] if vectors else buckets


def gather_parameters(model: GPT) -> None:
    """Gather the parameters outside the blocks. Call it before model.forward(), which bypasses FSDP's hook."""
    if hasattr(model, "unshard"):  # an FSDPModule
        model.unshard()


def free_gathered(model: GPT) -> None:
    """Free the parameters that a forward without a backward leaves gathered: outside the blocks, with zero2 all.

    The steps of a CUDA graph change the weights, and FSDP does not notice that.
    """
    for module in (model, *model.h):
        if hasattr(module, "reshard"):  # an FSDPModule
            module.reshard()
