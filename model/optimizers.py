"""AdamW over flat buffers, which hold all weights one after another, and the choice of the optimizer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels import muon as muon_op
from kernels.adamw import MULTIPLE, auto
from kernels.muon import auto as muon_auto
from kernels.registry import Unavailable, describe, load
from model.compat import add_tensors
from model.muon import Muon
from model.optim import OptimConfig, Optimizer, TorchAdamW
from runtime.ranks import Ranks, is_sharded
from runtime.torch_compat import copy_tensors

EPS = 1e-8  # torch.optim.AdamW's
ALIGNMENT = 64  # elements: every bf16 weight begins at a multiple of 128 bytes


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
            end = -(-last // ALIGNMENT) * ALIGNMENT
            self.gaps.append((last, end))
            if self.weights[i].dim() >= 2:
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
        self.adamw(
            master=self.flat_master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            weight=self.flat_weight,
            gradient=self.flat_gradient,
            lr=self.lr,
            scale=scale,
            updates=self.count,
            refuse=refuse,
            decayed=self.decay_end,
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


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    ranks: Ranks | None = None,
    impl: str = "auto",
    muon: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    **options: bool,
) -> Optimizer:
    """Return the optimizer for the backend `impl` of the op adamw: TorchAdamW for eager, FlatAdamW for all others.

    `auto` is eager for weights that FlatAdamW does not take. If the config names Muon, it is Muon with the backend
    `muon`, which computes in `dtype`. `options` are Optimizer's. Raises Unavailable if a backend cannot run here.
    """
    if config.name == "muon":
        return make_muon(model, config, ranks, impl, muon, dtype, **options)
    weight = next(model.parameters())
    name, reason = impl, flat_unavailable(weight)
    if impl == "auto":
        name = "eager" if reason else auto.choose(weight.device)
    if name == "eager":
        optimizer = TorchAdamW(model, config, ranks, **options)
    elif reason:
        raise Unavailable(f"adamw={name} cannot run here: {reason}")
    else:
        optimizer = FlatAdamW(model, config, load("adamw", name, weight.device), ranks, **options)
    optimizer.kernels = {"adamw": describe_adamw(weight, impl, name)}
    return optimizer


def describe_adamw(weight: Tensor, impl: str, name: str) -> str:
    """Return the row's text for the backend `name` of adamw, which `impl`, the config's choice, stands for."""
    return describe("adamw", impl, chosen=name, shape=(MULTIPLE,), dtype=weight.dtype, device=weight.device)


def make_muon(
    model: nn.Module,
    config: OptimConfig,
    ranks: Ranks | None,
    adamw: str,
    impl: str,
    dtype: torch.dtype,
    **options: bool,
) -> Muon:
    """Return Muon with the backend `impl` of the op muon. See make_optimizer()."""
    weight = next(model.parameters())
    if is_sharded(weight):
        raise Unavailable("optim=muon needs whole matrices: choose parallel=ddp or context, or optim=adamw")
    if adamw not in ("auto", "eager"):
        raise Unavailable(f"adamw={adamw} cannot run here: with optim=muon only kernels.adamw=eager updates the rest")
    name = muon_auto.choose(weight.device) if impl == "auto" else impl
    optimizer = Muon(model, config, load("muon", name, weight.device), ranks, dtype=dtype, **options)
    shape = {"shape": next(iter(muon_op.SIZES.values()))["shape"], "dtype": dtype, "device": weight.device}
    optimizer.kernels = {"adamw": describe_adamw(weight, adamw, "eager")}
    optimizer.kernels["muon"] = describe("muon", impl, chosen=name, **shape)
    return optimizer


def make_reference_optimizer(
    model: nn.Module, config: OptimConfig, rounded: torch.dtype, dtype: torch.dtype
) -> Optimizer:
    """Return the config's optimizer in eager PyTorch, for lab/proof. See TorchAdamW for `rounded`, Muon for `dtype`."""
    if config.name == "muon":
        device = next(model.parameters()).device
        return Muon(model, config, load("muon", "eager", device), rounded=rounded, dtype=dtype)
    return TorchAdamW(model, config, rounded=rounded)


def flat_unavailable(weight: Tensor) -> str | None:
    """Return why FlatAdamW cannot update a model with such weights, or None if it can."""
    if is_sharded(weight):
        return "only kernels.adamw=eager updates sharded weights (parallel=fsdp or zero2)"
    if weight.dtype == torch.float32:
        return "only kernels.adamw=eager updates fp32 weights: choose it, or precision=bf16"
    return None
