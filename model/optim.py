"""AdamW over fp32 weights, whatever dtype the model stores; gradient clipping; a schedule of warm-up and cosine."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.terminal import warn
from kernels.registry import KernelsConfig, default_impl
from model.compat import add_tensors
from model.parallel import Averaging
from runtime.config import check
from runtime.ranks import Ranks, is_sharded
from runtime.torch_compat import copy_tensors

HISTORY = 256  # steps
OPTIMIZERS = "adamw", "muon"
MOMENTUM = 0.95
MOMENTS = "exp_avg", "exp_avg_sq"  # AdamW's


@dataclass
class OptimConfig:
    learning_rate: float
    min_lr: float  # where the cosine ends
    warmup_steps: int
    weight_decay: float  # for matrices only
    beta1: float
    beta2: float
    grad_clip: float  # the largest norm of all gradients together; 0: no limit
    name: str = "adamw"  # one of OPTIMIZERS
    momentum: float = MOMENTUM  # of Muon
    impl: str | None = None  # the name of kernels.adamw before it was an op: torch | triton (rename_impl())

    def __post_init__(self):
        for key in ("learning_rate", "min_lr", "warmup_steps", "weight_decay", "grad_clip"):
            value = getattr(self, key)
            check(0 <= value < math.inf, f"optim.{key}={value}: it must be finite and not negative")
        for key in ("beta1", "beta2", "momentum"):
            check(0 <= getattr(self, key) < 1, f"optim.{key}={getattr(self, key)}: it must be in [0, 1)")
        check(
            self.min_lr <= self.learning_rate,
            f"optim.min_lr={self.min_lr} is above optim.learning_rate={self.learning_rate}, and the rate only falls",
        )
        check(self.name in OPTIMIZERS, f"optim.name={self.name}: choose {', '.join(OPTIMIZERS)}")
        is_used = self.name == "muon" or self.momentum == MOMENTUM
        check(is_used, f"optim.momentum={self.momentum} has no effect with optim.name={self.name}: add optim=muon")
        check(self.impl in (None, "torch", "triton"), f"optim.impl={self.impl}: choose torch, triton or null")

    @property
    def suffix(self) -> str:
        """The end of a run's name: "-muon", or "" for AdamW."""
        return "" if self.name == "adamw" else f"-{self.name}"


def rename_impl(config: OptimConfig, kernels: KernelsConfig) -> None:
    """If optim.impl is set, move its choice to kernels.adamw, and warn that the key will go.

    Raises UserError if kernels.adamw already names another backend.
    """
    if config.impl is None:
        return
    name = {"torch": "eager"}.get(config.impl, config.impl)
    both = f"optim.impl={config.impl} is the old name of kernels.adamw={name}"
    check(
        kernels.adamw in (default_impl("adamw"), name), f"{both}, but kernels.adamw={kernels.adamw}: remove optim.impl"
    )
    if os.environ.get("RANK", "0") == "0":
        warn(f"{both}, and the next release does not know it: write kernels.adamw={name}")
    kernels.adamw, config.impl = name, None


def learning_rate(config: OptimConfig, step: int, last: float) -> float:
    """The rate of a step, counted from 1: linear warm-up, then half a cosine that ends at min_lr in step `last`.

    It is one step ahead of nanoGPT, where the highest rate is the rate of step warmup_steps + 1.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
    return config.min_lr + (config.learning_rate - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


class Optimizer(ABC):
    """Averages the gradients over the ranks, clips them, and makes AdamW's or Muon's updates of fp32 weights.

    A bf16 weight has an fp32 master here. The master sums the gradients of the micro-steps, and after the update the
    weight is the rounded master. A bf16 weight alone would lose every change below 2^-9 of its size. If FSDP shards a
    weight, this rank updates its own rows, and FSDP averages the gradients.

    A step whose loss or gradient norm is not finite changes nothing: the step is refused. The kernels of the update
    read a flag on the device, so the host does not wait. With `stop`, all steps after the first refused one are refused
    too, until the host sets first_refused to 0. With `history`, the loss and the gradient norm of the last HISTORY
    steps stay on the device.
    """

    def __init__(self, model: nn.Module, ranks: Ranks | None = None, stop: bool = True, history: bool = False):
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = list(model.parameters())
        self.ranks, self.stop = ranks or Ranks(), stop
        # The counters and lr are on the device, so that a CUDA graph can contain a step
        device = local(self.weights[0]).device
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # calls of step(), refused steps included
        self.refused = torch.zeros_like(self.steps)  # how many steps were refused
        self.first_refused = torch.zeros_like(self.steps)  # the number of the first refused step; 0: none
        self.refused_in_a_row = torch.zeros_like(self.steps)  # since the last accepted step
        # Step n is in row n % HISTORY
        self.history = torch.full((HISTORY, 2), math.nan, device=device) if history else None
        self.checked_steps = 0  # the last step that warn_of_spike() has seen
        self.lr = torch.zeros((), device=device)
        self.being_copied: torch.cuda.Event | None = None  # the next update, or the next captured step, waits for it
        # op -> its backend and version, for the row: adamw, and muon if it runs. make_optimizer() sets it
        self.kernels: dict[str, str] = {}
        self.observer: Callable[[str, Tensor], None] | None = None  # the next step calls it for each gradient, once
        self.sharded = is_sharded(self.weights[0])
        averaged = [] if self.ranks.single or self.sharded else self.weights
        self.averaging = Averaging(averaged, self.ranks, self.flatten_gradients)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Run the backward of a micro-step, and add its gradients to the sums.

        In the last micro-step of a step, the ranks average the sums while the backward runs.
        """
        if last:
            self.averaging.begin()
        loss.backward()
        self.accumulate()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of a loss.backward() to the sums, in fp32. Averaging may have added some already."""
        self.add_gradients([i for i, weight in enumerate(self.weights) if weight.grad is not None])

    @torch.no_grad()
    def step(self, lr: float | Tensor, loss: Tensor) -> Tensor:
        """Wait for the averages, clip the gradients, update the weights, and clear the gradients.

        `loss` is the loss of the step, the same on every rank. Returns the norm of the gradients before clipping, on
        the device.
        """
        self.steps += 1
        self.lr.fill_(lr)
        self.averaging.wait()
        norm = self.gradient_norm()
        if self.observer:
            for name, gradient in zip(self.names, self.gradients, strict=True):
                self.observer(name, gradient)
            self.observer = None
        refuse = ~(norm.isfinite() & loss.isfinite())
        if self.stop:
            refuse |= self.first_refused > 0
        self.first_refused += torch.where(refuse & (self.first_refused == 0), self.steps, 0)
        self.refused += refuse
        self.refused_in_a_row.add_(1).mul_(refuse)
        if self.history is not None:
            self.history.index_copy_(0, (self.steps % HISTORY).view(1), torch.stack([loss.to(norm), norm]).view(1, 2))
        self.wait_until_copied()
        self.update(norm, refuse)
        self.clear_gradients()
        return norm

    def wait_until_copied(self) -> None:
        """Let the device wait until the last checkpoint has copied the weights and moments."""
        if self.being_copied:
            torch.cuda.current_stream().wait_event(self.being_copied)
            self.being_copied = None

    @torch.no_grad()
    def load(self, steps: int, updates: int) -> None:
        """Continue after so many steps and updates. Copy the weights and moments into the tensors of state() first."""
        self.steps.fill_(steps)
        self.refused.fill_(steps - updates)
        self.set_updates(updates)
        self.round_weights()

    @abstractmethod
    def add_gradients(self, bucket: list[int]) -> None:
        """Add the gradients of the weights with these indices to the sums, and free the gradients."""

    @abstractmethod
    def flatten_gradients(self, bucket: list[int]) -> Tensor:
        """Do what add_gradients() does. Return one flat tensor, of which the sums of this bucket are views."""

    @property
    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """The summed gradients, in the order of the weights."""

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Return the norm of the averaged gradients of all weights, fp32 on the device."""

    @abstractmethod
    def update(self, norm: Tensor, refuse: Tensor) -> None:
        """Clip the gradients, whose norm is given, and update the weights, unless `refuse` is true."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Free the gradients."""

    @abstractmethod
    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the groups "model", "exp_avg" and "exp_avg_sq" for checkpoints, each of them name -> fp32 tensor.

        With Muon the last two lack the matrices, which have the group "momentum". The tensors are the optimizer's own.
        They are DTensors if FSDP shards the model.
        """

    def state_shapes(self) -> dict[str, torch.Size]:
        """Return "group.name" -> the shape of the whole tensor, for all tensors of state(). It allocates nothing."""
        shapes = {name: weight.shape for name, weight in zip(self.names, self.weights, strict=True)}
        return {f"{group}.{name}": shapes[name] for group, names in self.state_names().items() for name in names}

    def state_names(self) -> dict[str, list[str]]:
        """Return the groups of state(), each of them with its names."""
        return dict.fromkeys(("model", *MOMENTS), self.names)

    @property
    @abstractmethod
    def updates(self) -> int:
        """The number of updates, which excludes refused steps. Synchronises."""

    @abstractmethod
    def set_updates(self, updates: int) -> None:
        """Set the number of updates."""

    @abstractmethod
    def round_weights(self) -> None:
        """Copy the masters, if there are any, into the weights, which rounds them."""


class TorchAdamW(Optimizer):
    """torch.optim.AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), fused.

    `options` are Optimizer's. With `rounded`, a lower dtype, fp32 weights are rounded to that dtype after each update
    (for lab/proof's reference). With `masters=False`, bf16 weights have no fp32 masters (for lab/peers.py).
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        ranks: Ranks | None = None,
        rounded: torch.dtype = torch.float32,
        masters: bool = True,
        **options: bool,
    ):
        super().__init__(model, ranks, **options)
        self.grad_clip = config.grad_clip
        self.rounded = rounded if rounded != torch.float32 else None
        is_half = any(weight.dtype != torch.float32 for weight in self.weights)
        self.has_masters = self.rounded is not None or (masters and is_half)
        self.masters = self.weights
        if self.rounded:
            with torch.no_grad():
                copy_tensors(self.weights, [weight.to(rounded) for weight in self.weights])
        if self.has_masters or self.sharded:
            copies = [local(weight).detach().to(torch.float32, copy=self.has_masters) for weight in self.weights]
            self.masters = [copy.requires_grad_() for copy in copies]
        masters = self.adamw_masters().values()
        self.adamw = torch.optim.AdamW(
            [
                {"params": [w for w in masters if w.dim() >= 2], "weight_decay": config.weight_decay},
                {"params": [w for w in masters if w.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(config.beta1, config.beta2),
            fused=True,
            capturable=self.lr.is_cuda,
        )
        for group in self.adamw.param_groups:
            group["lr"] = self.lr  # not an argument of AdamW(), which would read its value

    def adamw_masters(self) -> dict[str, Tensor]:
        """Return name -> master of the weights that AdamW updates: all of them."""
        return dict(zip(self.names, self.masters, strict=True))

    def add_gradients(self, bucket: list[int]) -> None:
        if not bucket or self.masters is self.weights:
            return
        masters, weights = [self.masters[i] for i in bucket], [self.weights[i] for i in bucket]
        gradients = [local(weight.grad) for weight in weights]
        if masters[0].grad is None:
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = torch.empty_like(master) if self.has_masters else gradient
            if self.has_masters:
                copy_tensors([master.grad for master in masters], gradients)
        else:
            add_tensors([master.grad for master in masters], gradients)
        for weight in weights:
            weight.grad = None

    def flatten_gradients(self, bucket: list[int]) -> Tensor:
        self.add_gradients(bucket)
        masters = [self.masters[i] for i in bucket]
        flat = torch.cat([master.grad.flatten() for master in masters])
        for master, part in zip(masters, flat.split([master.numel() for master in masters]), strict=True):
            master.grad = part.view_as(master)
        return flat

    @property
    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters]

    def gradient_norm(self) -> Tensor:
        norm = nn.utils.get_total_norm(self.gradients)
        return self.ranks.sum(norm.square()).sqrt() if self.sharded else norm

    def update(self, norm: Tensor, refuse: Tensor) -> None:
        if self.grad_clip:
            nn.utils.clip_grads_with_norm_(self.masters, self.grad_clip, norm)
        self.update_masters(refuse)
        self.round_weights()

    def update_masters(self, refuse: Tensor) -> None:
        """Update the masters from their clipped gradients, unless `refuse` is true."""
        self.adamw.found_inf = refuse.float()  # as a GradScaler does
        self.adamw.step()

    def clear_gradients(self) -> None:
        for master in self.masters:
            master.grad = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        if not self.adamw.state:  # before the first step, AdamW has no moments
            self.load(0, 0)
        weights, masters = dict(zip(self.names, self.weights, strict=True)), self.adamw_masters()
        groups = {"model": dict(zip(self.names, self.masters, strict=True))}
        groups |= {key: {name: self.adamw.state[m][key] for name, m in masters.items()} for key in MOMENTS}
        return {
            key: {name: self._as_dtensor(tensor, weights[name]) for name, tensor in tensors.items()}
            for key, tensors in groups.items()
        }

    @property
    def updates(self) -> int:
        master = next(iter(self.adamw_masters().values()))
        return int(self.adamw.state[master]["step"])

    def set_updates(self, updates: int) -> None:
        for master in self.adamw_masters().values():
            state = self.adamw.state[master]
            state["step"] = torch.full((), float(updates), device=master.device)
            for key in MOMENTS:
                state.setdefault(key, torch.zeros_like(master))

    def round_weights(self) -> None:
        if self.has_masters:
            masters = [master.to(self.rounded) for master in self.masters] if self.rounded else self.masters
            copy_tensors([local(weight) for weight in self.weights], masters)

    def _as_dtensor(self, tensor: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's rows as a DTensor that is sharded as `weight`. Without FSDP, return the tensor."""
        if not self.sharded:
            return tensor.detach()
        from torch.distributed.tensor import DTensor

        mesh, placements = weight.device_mesh, weight.placements
        return DTensor.from_local(
            tensor.detach(), mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor that FSDP shards. Return any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor
