"""Muon for the matrices of the blocks (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), or else AdamW.

AdamW divides each element of the mean gradient by its own size. Muon does this with the singular values of a matrix:
the op muon (kernels/muon/) brings all of them near 1. For a matrix w (R, C) with the clipped gradient g:

    m <- m + (1 - momentum) (g - m)
    u  = g + momentum (m - g)                                               Nesterov's momentum
    w <- w - lr (0.2 sqrt(max(R, C)) muon(u) + weight_decay w)

An orthogonal matrix (R, C) has the RMS 1 / sqrt(max(R, C)). So each step has the RMS 0.2 lr, as AdamW's steps have, and
the learning rate and weight decay of AdamW can be kept (Moonlight, Liu et al. 2025, arXiv:2502.16982).

A weight is one matrix, also q, k and v together, and the gate with up; others orthogonalise these parts separately.

The op takes the same matrix of all blocks at once. Under DDP each rank computes the op for its share of them, and sends
it to the others: 170 MB in bf16 for GPT-2 124M. On one GPU the op takes 0.7 TFLOP a step for it in Triton and bf16,
and 1.5 in PyTorch, whatever the batch.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.adamw import MULTIPLE
from model.flat_adamw import FlatAdamW
from model.optim import MOMENTS, OptimConfig, TorchAdamW
from runtime.ranks import Ranks

RMS = 0.2  # of an update of AdamW, about


class Muon(TorchAdamW):
    """Muon for the matrices in the blocks (`h.`), and TorchAdamW for embeddings, a head and vectors.

    `muon` is the function of a backend of the op, and `dtype` the dtype in which it computes. The other arguments are
    TorchAdamW's. The momentum is fp32: 4 bytes a weight, where AdamW's moments take 8. The weights must not be sharded.
    A step holds up to three fp32 copies of a matrix of all blocks.
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
        self.groups = group_block_matrices(self.names, self.weights)
        # (n, R, C) fp32 for each group
        self.momenta = [self.lr.new_zeros(len(group), *self.weights[group[0]].shape) for group in self.groups]

    def adamw_masters(self) -> dict[str, Tensor]:
        return {name: master for name, master in super().adamw_masters().items() if not is_block_matrix(name, master)}

    def update_masters(self, refuse: Tensor) -> None:
        super().update_masters(refuse)
        decay = torch.where(refuse, 1.0, 1 - self.lr * self.config.weight_decay)
        for indices, momentum in zip(self.groups, self.momenta, strict=True):
            masters = [self.masters[i] for i in indices]
            gradients = torch.stack([master.grad for master in masters])
            mean = momentum.lerp(gradients, 1 - self.config.momentum)
            directions = gradients.lerp(mean, self.config.momentum).to(self.dtype)
            momentum.copy_(torch.where(refuse, momentum, mean))
            steps = orthogonalise(self.muon, directions, self.ranks) * (self.lr * update_length(momentum))
            steps = torch.where(refuse, 0.0, steps)  # NaN times 0 is NaN
            for master, step in zip(masters, steps, strict=True):
                master.mul_(decay).sub_(step)

    def state_names(self) -> dict[str, list[str]]:
        return name_states(self.names, self.groups)

    def state(self) -> dict[str, dict[str, Tensor]]:
        momentum = [tensor for momentum in self.momenta for tensor in momentum]
        return super().state() | {"momentum": dict(zip(self.state_names()["momentum"], momentum, strict=True))}


class FlatMuon(FlatAdamW):
    """Muon for the matrices in the blocks of a bf16 or fp16 model, and FlatAdamW for its other weights.

    The matrices of the blocks are contiguous in the flat buffers. Their part of `exp_avg` holds Muon's momentum, and
    `exp_avg_sq` has no part for them. The passes around the op are two kernels (kernels/muon/_updates.py). The
    arguments are those of Muon and FlatAdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        adamw: Callable,
        muon: Callable,
        ranks: Ranks | None = None,
        dtype: torch.dtype = torch.bfloat16,
        **options: bool,
    ):
        from kernels.muon._updates import apply_steps, update_momentum  # they need Triton

        super().__init__(model, config, adamw, ranks, **options)
        self.muon, self.dtype, self.apply_steps, self.update_momentum = muon, dtype, apply_steps, update_momentum
        self.groups = group_block_matrices(self.names, self.weights)
        indices = [i for group in self.groups for i in group]
        end = max(self.offsets[i] + self.weights[i].numel() for i in indices)
        self.blocks = slice(min(self.offsets[i] for i in indices), -(-end // MULTIPLE) * MULTIPLE)
        self.exp_avg_sq = torch.cat([self.exp_avg_sq[: self.blocks.start], self.exp_avg_sq[self.blocks.stop :]])

    def update_weights(self, scale: Tensor, refuse: Tensor) -> None:
        c, blocks = self.config, self.blocks
        for part in (slice(0, blocks.start), slice(blocks.stop, len(self.flat_master))):
            self.update_by_adamw(part, self.exp_avg[part], self.exp_avg_sq[self.without_blocks(part)], scale, refuse)
        for indices in self.groups:
            momentum, gradient = self.matrices(self.exp_avg, indices), self.matrices(self.flat_gradient, indices)
            directions = self.update_momentum(momentum, gradient, scale, refuse, c.momentum, self.dtype)
            self.apply_steps(
                master=self.matrices(self.flat_master, indices),
                weight=self.matrices(self.flat_weight, indices),
                steps=orthogonalise(self.muon, directions, self.ranks),
                lr=self.lr,
                refuse=refuse,
                length=update_length(directions),
                weight_decay=c.weight_decay,
            )

    def without_blocks(self, part: slice) -> slice:
        """Return the slice of exp_avg_sq for a slice of the flat buffers outside the matrices of the blocks."""
        missing = self.blocks.stop - self.blocks.start if part.start >= self.blocks.stop else 0
        return slice(part.start - missing, part.stop - missing)

    def matrices(self, flat: Tensor, indices: list[int]) -> Tensor:
        """Return a group's weights (n, R, C) in a flat buffer. They are evenly spaced, because the blocks are equal."""
        first, *others = (self.offsets[i] for i in indices)
        (R, C), stride = self.weights[indices[0]].shape, others[0] - first if others else MULTIPLE
        assert [first, *others] == [first + n * stride for n in range(len(indices))]
        return flat.as_strided((len(indices), R, C), (stride, C, 1), first)

    def state_names(self) -> dict[str, list[str]]:
        return name_states(self.names, self.groups)

    def state(self) -> dict[str, dict[str, Tensor]]:
        groups, masters = self.state_names(), self.views(self.flat_master)
        averages = dict(zip(self.names, self.views(self.exp_avg), strict=True))  # of AdamW and of Muon
        return {
            "model": dict(zip(self.names, masters, strict=True)),
            "exp_avg": {name: averages[name] for name in groups["exp_avg"]},
            "exp_avg_sq": {name: self.view_squares(self.names.index(name)) for name in groups["exp_avg_sq"]},
            "momentum": {name: averages[name] for name in groups["momentum"]},
        }

    def view_squares(self, i: int) -> Tensor:
        """Return the part of weight i in exp_avg_sq."""
        weight, start = self.weights[i], self.offsets[i]
        return self.exp_avg_sq[self.without_blocks(slice(start, start + weight.numel()))].view(weight.shape)


def orthogonalise(muon: Callable, matrices: Tensor, ranks: Ranks) -> Tensor:
    """Return muon(matrices) (n, R, C). Each rank computes its share of them, and sends it to the others."""
    if ranks.single:
        return muon(matrices)
    share = -(-len(matrices) // ranks.world_size)
    mine = matrices[share * ranks.rank :][:share]
    mine = F.pad(mine, (0, 0, 0, 0, 0, share - len(mine)))  # all ranks send equally many
    return ranks.concatenate(muon(mine))[: len(matrices)]


def update_length(matrices: Tensor) -> float:
    """Return the factor that gives an orthogonal matrix (R, C) the RMS 0.2."""
    return RMS * math.sqrt(max(matrices.shape[1:]))


def is_block_matrix(name: str, weight: Tensor) -> bool:
    """Return whether Muon updates a weight: it is a matrix in a block."""
    return name.startswith("h.") and weight.dim() == 2


def group_block_matrices(names: list[str], weights: list[Tensor]) -> list[list[int]]:
    """Return the indices of the matrices in the blocks. A group is the same matrix of all blocks."""
    groups: dict[tuple, list[int]] = {}
    for i, (name, weight) in enumerate(zip(names, weights, strict=True)):
        if is_block_matrix(name, weight):
            groups.setdefault((name.split(".", 2)[2], weight.shape), []).append(i)
    return list(groups.values())


def name_states(names: list[str], groups: list[list[int]]) -> dict[str, list[str]]:
    """Return the groups of Optimizer.state(), each of them with its names."""
    momentum = [names[i] for group in groups for i in group]
    others = [name for name in names if name not in set(momentum)]
    return {"model": names, **dict.fromkeys(MOMENTS, others), "momentum": momentum}
