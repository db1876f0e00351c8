"""AdamW over flat buffers, which hold all weights one after another."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.adamw import MULTIPLE
from model.compat import add_tensors
from model.optim import OptimConfig, Optimizer
from runtime.ranks import Ranks
from runtime.torch_compat import copy_tensors

EPS = 1e-8  # torch.optim.AdamW's
ALIGNMENT = 64  # elements: every bf16 vector begins at a multiple of 128 bytes


class FlatAdamW(Optimizer):
    """AdamW for bf16 or fp16 weights. The model's weights become views of one flat buffer, and matrices come first.

    In a single process, the gradients of the first micro-step keep their dtype. All other sums are in fp32.
    `adamw` is the function of a backend of the op. `options` are Optimizer's.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, adamw: Callable, ranks: Ranks | None = None, **options: bool
    ):
        super().__init__(model, ranks, **options)
        self.config, self.adamw = config, adamw
        self.offsets, self.gaps, self.decay_end, end = [0] * len(self.weights), [], 0, 0
        for i in sorted(range(len(self.weights)), key=lambda i: self.weights[i].dim() < 2):
            self.offsets[i], last = end, end + self.weights[i].numel()
            is_matrix = self.weights[i].dim() >= 2
            alignment = MULTIPLE if is_matrix else ALIGNMENT
            end = -(-last // alignment) * alignment
            self.gaps.append((last, end))
            if is_matrix:
                self.decay_end = end  # only matrices decay
        self.gaps.append((end, -(-end // MULTIPLE) * MULTIPLE))
        self.flat_weight = self.empty(self.weights[0].dtype)
        for weight, view in zip(self.weights, self.views(self.flat_weight), strict=True):
            weight.data = view.copy_(weight.detach())
        self.flat_master = self.flat_weight.float()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.flat_master), torch.zeros_like(self.flat_master)
        self.flat_gradient: Tensor | None = None
        self.has_sums = False  # whether flat_gradient has the gradients of an earlier micro-step
        self.count = torch.zeros((), dtype=torch.float64, device=self.flat_master.device)  # updates

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return a new flat tensor. The gaps between the weights and behind the last one are 0."""
        flat = torch.empty(self.gaps[-1][1], dtype=dtype, device=self.lr.device)
        for start, end in self.gaps:
            if start < end:
                flat[start:end] = 0
        return flat

    def view(self, flat: Tensor, i: int) -> Tensor:
        """Return the part of weight i in a flat tensor."""
        weight, start = self.weights[i], self.offsets[i]
        return flat[start : start + weight.numel()].view(weight.shape)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of all weights in a flat tensor, in the order of the weights."""
        return [self.view(flat, i) for i in range(len(self.weights))]

    def accumulate(self) -> None:
        super().accumulate()
        self.has_sums = True

    def add_gradients(self, bucket: list[int]) -> None:
        if self.flat_gradient is None:
            self.flat_gradient = self.empty(self.flat_weight.dtype if self.ranks.single else torch.float32)
        elif self.has_sums:
            self.flat_gradient = self.flat_gradient.float()
        if not bucket:
            return
        add = add_tensors if self.has_sums else copy_tensors
        add([self.view(self.flat_gradient, i) for i in bucket], [self.weights[i].grad for i in bucket])
        for i in bucket:
            self.weights[i].grad = None

    def flatten_gradients(self, bucket: list[int]) -> Tensor:
        self.add_gradients(bucket)
        start, last = min(self.offsets[i] for i in bucket), max(bucket, key=lambda i: self.offsets[i])
        return self.flat_gradient[start : self.offsets[last] + self.weights[last].numel()]

    @property
    def gradients(self) -> list[Tensor]:
        return self.views(self.flat_gradient)

    def gradient_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.flat_gradient, dtype=torch.float32)

    def update(self, norm: Tensor, refuse: Tensor) -> None:
        c = self.config
        scale = (c.grad_clip / (norm + 1e-6)).clamp(max=1) if c.grad_clip else torch.ones_like(norm)
        self.count += ~refuse
        self.update_weights(scale, refuse)

    def update_weights(self, scale: Tensor, refuse: Tensor) -> None:
        """Update all weights from their gradients times `scale`, unless `refuse` is true."""
        self.update_by_adamw(slice(0, len(self.flat_master)), self.exp_avg, self.exp_avg_sq, scale, refuse)

    def update_by_adamw(self, part: slice, exp_avg: Tensor, exp_avg_sq: Tensor, scale: Tensor, refuse: Tensor) -> None:
        """Update a slice of the flat buffers with these moments. It begins and ends at multiples of MULTIPLE."""
        c = self.config
        self.adamw(
            master=self.flat_master[part],
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            weight=self.flat_weight[part],
            gradient=self.flat_gradient[part],
            lr=self.lr,
            scale=scale,
            updates=self.count,
            refuse=refuse,
            decayed=min(max(self.decay_end - part.start, 0), len(exp_avg)),
            beta1=c.beta1,
            beta2=c.beta2,
            eps=EPS,
            weight_decay=c.weight_decay,
        )

    def clear_gradients(self) -> None:
        self.flat_gradient, self.has_sums = None, False

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
