"""Muon for the matrices of the blocks (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), or else AdamW.

AdamW divides each element of the mean gradient by its own size. Muon does this with the singular values of a matrix:
the op muon (kernels/muon/) brings all of them near 1. For a matrix w (R, C) with the clipped gradient g:

    m <- m + (1 - momentum) (g - m)
    u  = g + momentum (m - g)                                               Nesterov's momentum
    w <- w - lr (0.2 sqrt(max(R, C)) muon(u) + weight_decay w)

An orthogonal matrix (R, C) has the RMS 1 / sqrt(max(R, C)). So each step has the RMS 0.2 lr, as AdamW's steps have, and
the learning rate and weight decay of AdamW can be kept (Moonlight, Liu et al. 2025, arXiv:2502.16982).

A weight is one matrix, also q, k and v together, and the gate with up; others orthogonalise these parts separately.

The op takes all matrices of a shape at once, so a step holds up to three fp32 copies of them. Under DDP each rank
computes the op for its share of them, and sends it to the others: 170 MB in bf16 for GPT-2 124M. On a single GPU the op
takes 1.1 TFLOP of a step there, whatever the batch.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.optim import MOMENTS, OptimConfig, TorchAdamW
from runtime.ranks import Ranks

RMS = 0.2  # of an update of AdamW, about


class Group(NamedTuple):
    """The matrices of one shape."""

    indices: list[int]  # of the weights
    momentum: Tensor  # (n, R, C) fp32


class Muon(TorchAdamW):
    """Muon for the matrices in the blocks (`h.`), and TorchAdamW for embeddings, a head and vectors.

    `muon` is the function of a backend of the op, and `dtype` the dtype in which it computes. The other arguments are
    TorchAdamW's. The momentum is fp32: 4 bytes a weight, where AdamW's moments take 8. The weights must not be sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        muon: Callable,
        ranks: Ranks | None = None,
        rounded: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.bfloat16,
        **options: bool,
    ):
        super().__init__(model, config, ranks, rounded, **options)
        self.config, self.muon, self.dtype = config, muon, dtype
        groups: dict[torch.Size, list[int]] = {}
        for i, (name, weight) in enumerate(zip(self.names, self.weights, strict=True)):
            if is_block_matrix(name, weight):
                groups.setdefault(weight.shape, []).append(i)
        self.groups = [Group(indices, self.lr.new_zeros(len(indices), *shape)) for shape, indices in groups.items()]

    def adamw_masters(self) -> dict[str, Tensor]:
        return {name: master for name, master in super().adamw_masters().items() if not is_block_matrix(name, master)}

    def update_masters(self, refuse: Tensor) -> None:
        super().update_masters(refuse)
        decay = torch.where(refuse, 1.0, 1 - self.lr * self.config.weight_decay)
        for indices, momentum in self.groups:
            masters = [self.masters[i] for i in indices]
            gradients = torch.stack([master.grad for master in masters])
            mean = momentum.lerp(gradients, 1 - self.config.momentum)
            directions = gradients.lerp(mean, self.config.momentum).to(self.dtype)
            momentum.copy_(torch.where(refuse, momentum, mean))
            length = RMS * math.sqrt(max(momentum.shape[1:]))
            # torch.where, because NaN times 0 is NaN
            steps = torch.where(refuse, 0.0, self.orthogonalise(directions) * (self.lr * length))
            for master, step in zip(masters, steps, strict=True):
                master.mul_(decay).sub_(step)

    def orthogonalise(self, matrices: Tensor) -> Tensor:
        """Return muon(matrices) (n, R, C). Each rank computes its share of them, and sends it to the others."""
        if self.ranks.single:
            return self.muon(matrices)
        share = -(-len(matrices) // self.ranks.world_size)
        mine = matrices[share * self.ranks.rank :][:share]
        mine = F.pad(mine, (0, 0, 0, 0, 0, share - len(mine)))  # all ranks send equally many
        return self.ranks.concatenate(self.muon(mine))[: len(matrices)]

    def state_names(self) -> dict[str, list[str]]:
        names = [self.names[i] for group in self.groups for i in group.indices]
        return super().state_names() | {key: [*self.adamw_masters()] for key in MOMENTS} | {"momentum": names}

    def state(self) -> dict[str, dict[str, Tensor]]:
        momentum = [tensor for group in self.groups for tensor in group.momentum]
        return super().state() | {"momentum": dict(zip(self.state_names()["momentum"], momentum, strict=True))}


def is_block_matrix(name: str, weight: Tensor) -> bool:
    """Return whether Muon updates a weight: it is a matrix in a block."""
    return name.startswith("h.") and weight.dim() == 2
