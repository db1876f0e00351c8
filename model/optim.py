"""AdamW over fp32 weights, whatever the model stores; warm-up and cosine; clipping."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.config import check


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
    """torch.optim.AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), fused on a GPU.

    A weight in bf16 has an fp32 master here, to which the gradient of every micro-step is added and from which the
    weight is rounded after the update: a bf16 weight alone would lose every change under 2^-9 of its size.
    """

    def __init__(self, model: nn.Module, config: OptimConfig):
        self.weights = list(model.parameters())
        low = any(weight.dtype != torch.float32 for weight in self.weights)
        self.masters = [weight.detach().float().requires_grad_() for weight in self.weights] if low else self.weights
        self.grad_clip = config.grad_clip
        self.adamw = torch.optim.AdamW(
            [
                {"params": [w for w in self.masters if w.dim() >= 2], "weight_decay": config.weight_decay},
                {"params": [w for w in self.masters if w.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(config.beta1, config.beta2),
            fused=self.weights[0].is_cuda,
        )

    @torch.no_grad()
    def accumulate(self) -> None:
        """After each backward(): move the gradients to the masters, so that they add up in fp32."""
        if self.masters is self.weights:
            return
        if self.masters[0].grad is None:
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad = weight.grad.float()
        else:
            torch._foreach_add_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Clip, update, clear. Returns the norm of the gradients before clipping, on the device."""
        norm = nn.utils.get_total_norm([master.grad for master in self.masters])
        if self.grad_clip:
            nn.utils.clip_grads_with_norm_(self.masters, self.grad_clip, norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.masters is not self.weights:
            torch._foreach_copy_(self.weights, self.masters)
        return norm
