"""AdamW in one kernel (kernels/adamw.py) over flat buffers, which hold all weights one after another."""

import torch
from torch import Tensor, nn

from kernels.adamw import BLOCK, adamw
from model.optim import OptimConfig, Optimizer
from runtime.ranks import Ranks

EPS = 1e-8  # torch.optim.AdamW's
ALIGNMENT = 64  # elements: every bf16 weight begins at a multiple of 128 bytes


class FusedAdamW(Optimizer):
    """AdamW for bf16 or fp16 weights. The model's weights become views of one flat buffer, and matrices come first.

    The gradients of the first micro-step keep their dtype. If another one follows, they are summed in fp32.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, ranks: Ranks | None = None, stop: bool = True):
        super().__init__(model, ranks, stop)
        self.config = config
        self.order = sorted(range(len(self.weights)), key=lambda i: self.weights[i].dim() < 2)
        self.offsets, self.decay_end, end = [0] * len(self.weights), 0, 0
        for i in self.order:
            self.offsets[i], end = end, end + -(-self.weights[i].numel() // ALIGNMENT) * ALIGNMENT
            if self.weights[i].dim() >= 2:
                self.decay_end = end  # only matrices decay
        self.padding = -end % BLOCK
        self.flat_weight = self.flatten([weight.detach() for weight in self.weights])
        for weight, view in zip(self.weights, self.views(self.flat_weight), strict=True):
            weight.data = view
        self.flat_master = self.flat_weight.float()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.flat_master), torch.zeros_like(self.flat_master)
        self.flat_gradient: Tensor | None = None
        # In fp64, because 1 - beta^t loses digits in fp32
        self.betas = torch.tensor([config.beta1, config.beta2], dtype=torch.float64, device=self.flat_master.device)
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
        parts = zip(self.offsets, self.weights, strict=True)
        return [flat[start : start + weight.numel()].view(weight.shape) for start, weight in parts]

    @torch.no_grad()
    def accumulate(self) -> None:
        gradient = self.flatten([weight.grad for weight in self.weights])
        if self.flat_gradient is None:
            self.flat_gradient = gradient
        else:
            self.flat_gradient = self.flat_gradient.float().add_(gradient)
        for weight in self.weights:
            weight.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        return self.views(self.flat_gradient)

    def average_gradients(self) -> Tensor:
        if not self.ranks.single:
            self.flat_gradient = self.flat_gradient.float()
            self.ranks.average([self.flat_gradient])
        return torch.linalg.vector_norm(self.flat_gradient, dtype=torch.float32)

    def update(self, norm: Tensor, refuse: Tensor) -> None:
        c = self.config
        scale = (c.grad_clip / (norm + 1e-6)).clamp(max=1) if c.grad_clip else torch.ones_like(norm)
        self.count += ~refuse
        corrections = (1 - self.betas**self.count).float()
        buffers = self.flat_master, self.exp_avg, self.exp_avg_sq, self.flat_weight, self.flat_gradient
        adamw(*buffers, self.lr, scale, corrections, refuse, self.decay_end, c.beta1, c.beta2, EPS, c.weight_decay)

    def clear_gradients(self) -> None:
        self.flat_gradient = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        groups = {"model": self.flat_master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {key: dict(zip(self.names, self.views(flat), strict=True)) for key, flat in groups.items()}

    @property
    def updates(self) -> int:
        return int(self.count)

    def set_updates(self, updates: int) -> None:
        self.count.fill_(updates)

    def round_weights(self) -> None:
        self.flat_weight.copy_(self.flat_master)
