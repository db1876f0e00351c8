"""AdamW in one kernel (kernels/adamw.py) over flat buffers, which hold all weights one after another."""

import torch
from torch import Tensor, nn

from kernels.adamw import BLOCK, adamw
from model.compat import add_tensors
from model.optim import OptimConfig, Optimizer
from runtime.ranks import Ranks

EPS = 1e-8  # torch.optim.AdamW's
ALIGNMENT = 64  # elements: every bf16 weight begins at a multiple of 128 bytes


class FusedAdamW(Optimizer):
    """For weights in a lower dtype than fp32, which become views of one flat buffer. Matrices come first: they decay.

    The gradients of the first micro-step keep their dtype. If another one follows, they are summed in fp32.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, ranks: Ranks | None = None, stop: bool = True):
        super().__init__(model, ranks, stop)
        self.config = config
        sizes = [-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in self.weights]
        self.order = sorted(range(len(sizes)), key=lambda i: self.weights[i].dim() < 2)
        self.starts, self.decayed, end = {}, 0, 0
        for i in self.order:
            self.starts[i], end = end, end + sizes[i]
            if self.weights[i].dim() >= 2:
                self.decayed = end
        self.padding = -end % BLOCK
        self.weight = self.flatten([weight.detach() for weight in self.weights])
        for weight, view in zip(self.weights, self.views(self.weight), strict=True):
            weight.data = view
        self.master = self.weight.float()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.gradient: Tensor | None = None
        # In fp64, because 1 - beta^t cancels
        self.betas = torch.tensor([config.beta1, config.beta2], dtype=torch.float64, device=self.master.device)
        self.count = torch.zeros_like(self.betas[0])  # updates

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        """Return one tensor with the elements of `tensors`, which are in the order of the weights."""
        parts = []
        for i in self.order:
            parts.append(tensors[i].flatten())
            if rest := -tensors[i].numel() % ALIGNMENT:
                parts.append(tensors[i].new_zeros(rest))
        return torch.cat([*parts, parts[0].new_zeros(self.padding)])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each weight in a flat tensor, in the order of the weights."""
        starts = [self.starts[i] for i in range(len(self.weights))]
        return [flat[start : start + w.numel()].view(w.shape) for start, w in zip(starts, self.weights, strict=True)]

    @torch.no_grad()
    def accumulate(self) -> None:
        gradients = [weight.grad for weight in self.weights]
        if self.gradient is None:
            self.gradient = self.flatten(gradients)
        else:
            self.gradient = self.gradient.float()
            add_tensors(self.gradients, gradients)
        for weight in self.weights:
            weight.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        return self.views(self.gradient)

    def average_gradients(self) -> Tensor:
        if not self.ranks.single:
            self.gradient = self.gradient.float()
            self.ranks.average([self.gradient])
        return torch.linalg.vector_norm(self.gradient, dtype=torch.float32)

    def update(self, norm: Tensor, refuse: Tensor) -> None:
        c = self.config
        scale = (c.grad_clip / (norm + 1e-6)).clamp(max=1) if c.grad_clip else torch.ones_like(norm)
        self.count += ~refuse
        corrections = (1 - self.betas**self.count).float()
        buffers = self.master, self.exp_avg, self.exp_avg_sq, self.weight, self.gradient
        adamw(*buffers, self.lr, scale, corrections, refuse, self.decayed, c.beta1, c.beta2, EPS, c.weight_decay)

    def clear_gradients(self) -> None:
        self.gradient = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        groups = {"model": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {key: dict(zip(self.names, self.views(flat), strict=True)) for key, flat in groups.items()}

    @property
    def updates(self) -> int:
        return int(self.count)

    def set_updates(self, updates: int) -> None:
        self.count.fill_(updates)

    def round_weights(self) -> None:
        self.weight.copy_(self.master)
