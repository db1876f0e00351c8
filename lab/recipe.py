"""The groups of the config that decide a training step, as one object. The lab builds its own steps from it."""

from dataclasses import dataclass, field

import torch

from kernels.registry import AttnConfig, KernelsConfig
from model.executed import executed_kernels
from model.generate_config import GenerateConfig
from model.gpt import GPT, GPTConfig
from model.optim import OptimConfig
from model.pretrained import Pretrained
from model.step import build


@dataclass(frozen=True)
class Recipe:
    """The groups of the config that decide what a training step computes."""

    model: GPTConfig
    kernels: KernelsConfig
    attn: AttnConfig
    optim: OptimConfig
    precision: str
    seed: int
    documents: bool = False  # attention stays inside documents
    generate: GenerateConfig = field(default_factory=GenerateConfig)  # for a generation with this model

    def build(self, device: torch.device, weights: Pretrained | None = None) -> GPT:
        """Return the model of this recipe, not compiled."""
        needs = ["starts"] if self.documents else []
        groups = self.model, self.kernels, self.attn, self.precision
        return build(*groups, device, seed=self.seed, weights=weights, needs=needs)

    def executed_kernels(self, shape: tuple[int, int], device: torch.device) -> dict[str, str | bool]:
        """Return op -> backend and version, for tokens of shape (B, T)."""
        groups = self.model, self.kernels, self.attn, self.precision
        return executed_kernels(*groups, shape, device, documents=self.documents)
