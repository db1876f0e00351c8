"""The kernel of helion.py. Importing this file imports Helion, which reads the source of this function."""

import functools
from collections.abc import Callable

import helion
import helion.language as hl
import torch


def cross_entropy(logits, targets, losses, ignore_index, write: hl.constexpr):
    """Write the losses (n,) of logits (n, V), and if `write` is true overwrite the logits with their gradient."""
    V = hl.specialize(logits.size(1))
    for row in hl.tile(logits.size(0), block_size=1):
        target = targets[row].to(torch.int32)  # compared with each column, and int64 takes two instructions
        largest, total = hl.full([row], float("-inf"), torch.float32), hl.zeros([row], torch.float32)
        target_logit = hl.zeros([row], torch.float32)
        for column in hl.tile(V):
            block = logits[row, column].to(torch.float32)
            before = largest
            largest = torch.maximum(before, torch.amax(block, dim=-1))
            total = total * torch.exp(before - largest) + torch.exp(block - largest[:, None]).sum(-1)
            target_logit += torch.where(column.index[None, :] == target[:, None], block, 0.0).sum(-1)
        counts = target != ignore_index
        lse = largest + torch.log(total)
        losses[row] = torch.where(counts, lse - target_logit, 0.0)
        if write:
            scale = torch.where(counts, 1.0, 0.0)
            for again in hl.tile(V):  # a name of its own, as Helion demands
                softmax = torch.exp(logits[row, again].to(torch.float32) - lse[:, None])
                onehot = torch.where(again.index[None, :] == target[:, None], 1.0, 0.0)
                logits[row, again] = ((softmax - onehot) * scale[:, None]).to(logits.dtype)


@functools.cache
def kernel(columns: int, write: bool, num_warps: int) -> Callable:
    """Return the Helion kernel for tiles of `columns`. A config is given, so Helion does not tune it."""
    config = helion.Config(block_sizes=[columns] * (2 if write else 1), num_warps=num_warps)
    return helion.kernel(cross_entropy, config=config, static_shapes=False)
