"""AdamW over fp32 weights, whatever the model stores; warm-up and cosine; clipping."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime.config import check
from runtime.ranks import Ranks


@dataclass
class OptimConfig:
    learning_rate: float
    min_lr: float  # where the cosine ends
    warmup_steps: int
    weight_decay: float  # of matrices only
    beta1: float
    beta2: float
    grad_clip: float  # largest norm of all gradients together; 0 is no limit

    def __post_init__(self):
        for key in ("learning_rate", "min_lr", "warmup_steps", "weight_decay", "grad_clip"):
            check(
                0 <= getattr(self, key) < math.inf,
                f"optim.{key}={getattr(self, key)}: it must be finite and not negative",
            )
        for key in ("beta1", "beta2"):
            check(0 <= getattr(self, key) < 1, f"optim.{key}={getattr(self, key)}: it must be in [0, 1)")
        check(
            self.min_lr <= self.learning_rate,
            f"optim.min_lr={self.min_lr} is above optim.learning_rate={self.learning_rate}, and the rate only falls",
        )


def learning_rate(config: OptimConfig, step: int, last: float) -> float:
    """Linear warm-up over `warmup_steps`, then half a cosine that ends at min_lr in step `last`. Steps count from 1."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
    return config.min_lr + (config.learning_rate - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


class Optimizer:
    """torch.optim.AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), fused.

    A weight in bf16 has an fp32 master here, to which the gradient of every micro-step is added and from which the
    weight is rounded after the update: a bf16 weight alone would lose every change under 2^-9 of its size. Of a weight
    that FSDP shards, this rank updates its own rows.

    A step whose loss or gradient norm is not finite changes nothing, as with a GradScaler: the fused kernel reads a
    flag on the device, so that nobody waits. `refused` counts such steps and `first_refused` is the first one's number;
    with `stop` every step after it is refused as well, until the host has looked.

    With `rounded`, a lower dtype, fp32 weights have the values that they would have in it: model/proof.py's reference.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        ranks: Ranks | None = None,
        stop: bool = True,
        rounded: torch.dtype = torch.float32,
    ):
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = list(model.parameters())
        self.ranks, self.stop, self.grad_clip = ranks or Ranks(), stop, config.grad_clip
        self.sharded = isinstance(self.weights[0], DTensor)
        self.rounded = rounded if rounded != torch.float32 else None
        self.low = self.rounded is not None or any(weight.dtype != torch.float32 for weight in self.weights)
        self.masters = self.weights
        if self.rounded:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, [weight.to(rounded) for weight in self.weights])
        if self.low or self.sharded:
            copies = [local(weight).detach().to(torch.float32, copy=self.low) for weight in self.weights]
            self.masters = [copy.requires_grad_() for copy in copies]
        self.adamw = torch.optim.AdamW(
            [
                {"params": [w for w in self.masters if w.dim() >= 2], "weight_decay": config.weight_decay},
                {"params": [w for w in self.masters if w.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        device = self.masters[0].device
        self.steps = 0  # asked for
        self.refused, self.first_refused = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.being_copied: torch.cuda.Event | None = None  # by a checkpoint; the next update waits for it
        self.observer: Callable[[str, Tensor], None] | None = None  # sees the next update's gradients, and goes

    @torch.no_grad()
    def accumulate(self) -> None:
        """After each backward(): move the gradients to the masters, so that they add up in fp32."""
        if self.masters is self.weights:
            return
        gradients = [local(weight.grad) for weight in self.weights]
        if self.masters[0].grad is None:
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = torch.empty_like(master) if self.low else gradient
            if self.low:
                torch._foreach_copy_([master.grad for master in self.masters], gradients)
        else:
            torch._foreach_add_([master.grad for master in self.masters], gradients)
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, lr: float, loss: Tensor) -> Tensor:
        """Average over the ranks, clip, update, clear. Returns the gradients' norm before clipping, on the device.

        `loss` is the step's, the same on every rank; it only decides whether the step is refused.
        """
        self.steps += 1
        gradients = [master.grad for master in self.masters]
        if self.sharded:  # FSDP has averaged them
            norm = self.ranks.total(nn.utils.get_total_norm(gradients).square()).sqrt()
        else:
            self.ranks.average(gradients)
            norm = nn.utils.get_total_norm(gradients)
        if self.observer:
            for name, gradient in zip(self.names, gradients, strict=True):
                self.observer(name, gradient)
            self.observer = None
        if self.grad_clip:
            nn.utils.clip_grads_with_norm_(self.masters, self.grad_clip, norm)
        refuse = ~(norm.isfinite() & loss.isfinite())
        if self.stop:
            refuse |= self.first_refused > 0
        self.first_refused += refuse * (self.first_refused == 0) * self.steps
        self.refused += refuse
        self.adamw.found_inf = refuse.float()
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if self.being_copied:
            torch.cuda.current_stream().wait_event(self.being_copied)
            self.being_copied = None
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self._lower()
        return norm

    def state(self) -> dict[str, dict[str, Tensor]]:
        """{"model", "exp_avg", "exp_avg_sq"}: name -> fp32 tensor, a DTensor where FSDP shards; for checkpoints."""
        if not self.adamw.state:  # before the first step
            self.load(0, 0)
        moments = ("exp_avg", "exp_avg_sq")
        groups = {"model": self.masters} | {key: [self.adamw.state[m][key] for m in self.masters] for key in moments}
        return {
            key: {name: self._whole(t, w) for name, t, w in zip(self.names, tensors, self.weights, strict=True)}
            for key, tensors in groups.items()
        }

    @property
    def updates(self) -> int:
        """Steps that AdamW made: its bias correction counts no refused one. Synchronises."""
        return int(self.adamw.state[self.masters[0]]["step"])

    @torch.no_grad()
    def load(self, steps: int, updates: int) -> None:
        """Go on after so many, with the weights and moments that were written into the tensors of state()."""
        self.steps = steps
        self.refused.fill_(steps - updates)
        for master in self.masters:
            held = self.adamw.state[master]
            held["step"] = torch.full((), float(updates), device=master.device)
            for key in ("exp_avg", "exp_avg_sq"):
                held.setdefault(key, torch.zeros_like(master))
        self._lower()

    def _lower(self) -> None:
        """From the masters to the weights that are lower."""
        if self.low:
            masters = [master.to(self.rounded) for master in self.masters] if self.rounded else self.masters
            torch._foreach_copy_([local(weight) for weight in self.weights], masters)

    def _whole(self, tensor: Tensor, weight: Tensor) -> Tensor:
        if not self.sharded:
            return tensor.detach()
        mesh, placements = weight.device_mesh, weight.placements
        return DTensor.from_local(
            tensor.detach(), mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor that FSDP shards; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
