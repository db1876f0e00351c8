"""Prepare a built model for training: torch.compile, and FSDP2 (Zhao et al. 2023, arXiv:2304.11277).

Under FSDP each rank holds some rows of each weight. The whole weights of a block are gathered while the block runs.
"""

import warnings

import torch

from model.gpt import GPT
from runtime.ranks import Ranks


def prepare(model: GPT, parallel: str, compiled: bool, seed: int, ranks: Ranks) -> GPT:
    """Compile the model if `compiled`, shard it if `parallel` is "fsdp", both in place, and return it.

    Each rank draws its own dropout: rank 0 as a single process does, the others from seed + rank.
    """
    if ranks.rank:
        torch.manual_seed(seed + ranks.rank)
    if parallel == "fsdp" and not ranks.single:
        shard(model, compiled, ranks)
    elif compiled:
        model.compile(fullgraph=True)
    return model


def shard(model: GPT, compiled: bool, ranks: Ranks) -> None:
    """Shard the model over the ranks, in place.

    torch.compile cannot trace FSDP's gathering, so it compiles each block and the loss separately.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # with DTensor it takes 1.5 s to import

    # A block may return a view. The warning is about writing to it in place, which nothing here does
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(model.wte.weight.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients of bf16 weights are summed in fp32
    for block in model.h:
        if compiled:
            block.forward = torch.compile(block.forward, fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if compiled:
        model.loss = torch.compile(model.loss, fullgraph=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def gather_parameters(model: GPT) -> None:
    """Gather the parameters outside the blocks. Call it before model.forward(), which bypasses FSDP's hook."""
    if hasattr(model, "unshard"):  # an FSDPModule
        model.unshard()
