"""FSDP2 (Zhao et al. 2023, arXiv:2304.11277): a rank holds its rows of each weight; a block is gathered as it runs."""

import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from model.gpt import GPT
from runtime.ranks import Ranks


def shard(model: GPT, compiled: bool, ranks: Ranks, device: torch.device) -> None:
    """Shard the model over the ranks, in place. What gathers cannot be traced: each block is compiled, and the loss."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing here is written in place
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients of bf16 weights are summed in fp32
    for block in model.h:
        if compiled:
            block.forward = torch.compile(block.forward, fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if compiled:
        model.loss = torch.compile(model.loss, fullgraph=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def whole(model: GPT) -> None:
    """Gather what lies outside the blocks, for a caller of model.forward(), which steps around the hook that would."""
    if isinstance(model, FSDPModule):
        model.unshard()
