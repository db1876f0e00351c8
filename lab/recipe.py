"""The groups of the config that decide a training step, as one object. The lab builds its own steps from it."""

from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.registry import TRAINING_OPS, AttnConfig, KernelsConfig, impl_by_op
from lab.bench.new_backends import check_new_backends
from model.config import PRECISIONS, GPTConfig
from model.executed import call_shapes, called_ops, executed_kernels, kernels_label, slower_kernels
from model.generate_config import GenerateConfig
from model.gpt import GPT
from model.optim import OptimConfig, Optimizer
from model.optimizers import make_optimizer
from model.pretrained import Pretrained
from model.step import build, load_ops
from runtime.ranks import Ranks

CHECKED_TOKENS = 128  # of the call with which a new backend is checked before a run


@dataclass(frozen=True)
class Recipe:
    """The groups of the config that decide what a training step computes."""

    is_ours = True  # False: it builds another system's model (lab/peers.py)
    model: GPTConfig
    kernels: KernelsConfig
    attn: AttnConfig
    optim: OptimConfig
    precision: str
    seed: int
    documents: bool = False  # attention stays inside documents
    generate: GenerateConfig = field(default_factory=GenerateConfig)  # for a generation with this model

    @classmethod
    def of(cls, cfg: Any) -> "Recipe":
        """Return the recipe in the config of train.py."""
        return cls(
            model=cfg.model,
            kernels=cfg.kernels,
            attn=cfg.attn,
            optim=cfg.optim,
            precision=cfg.precision,
            seed=cfg.seed,
            documents=cfg.data.mask_documents,
        )

    @property
    def ops(self) -> list[str]:
        """The ops of a training step with this model and this optimizer."""
        called = called_ops(self.model, TRAINING_OPS)
        return [op for op in called if op != "muon" or self.optim.name == "muon"]

    @property
    def label(self) -> str:
        """A short name of the kernels, the precision and the optimizer: `triton-gluon-bf16`, `eager-sdpa-fp32-muon`."""
        return f"{kernels_label(self.model, self.kernels, self.attn)}-{self.precision}{self.optim.suffix}"

    @property
    def chosen_kernels(self) -> dict[str, str | bool]:
        """op -> the backend that the config chooses."""
        return impl_by_op(self.kernels, self.attn, self.ops) | {"compile": self.kernels.compile}

    @property
    def groups(self) -> tuple[GPTConfig, KernelsConfig, AttnConfig, str]:
        return self.model, self.kernels, self.attn, self.precision

    @property
    def attention_needs(self) -> list[str]:
        """The optional arguments that attention must take because of the data."""
        return ["starts"] if self.documents else []

    def check_kernels(self, device: torch.device) -> dict[str, str]:
        """Return the results of check_new_backends().

        Raises Unavailable if kernels cannot run on `device`, and WrongKernel if a new one is wrong.
        """
        load_ops(*self.groups, device, self.attention_needs)
        length = min(CHECKED_TOKENS, self.model.block_size)
        shapes = call_shapes(self.model, self.kernels, self.precision, (1, length), documents=self.documents)
        calls = {op: (arguments, PRECISIONS[self.precision][1]) for op, arguments in shapes.items()}
        return check_new_backends(self.kernels, self.attn, device, self.ops, calls)

    def build(self, device: torch.device, weights: Pretrained | None = None) -> GPT:
        """Return the model of this recipe, not compiled."""
        return build(*self.groups, device, seed=self.seed, weights=weights, needs=self.attention_needs)

    def make_optimizer(self, model: GPT, ranks: Ranks | None = None, **options: bool) -> Optimizer:
        """Return the optimizer of this recipe: see make_optimizer() in model/optimizers.py."""
        backends = {"impl": self.kernels.adamw, "muon": self.kernels.muon, "dtype": PRECISIONS[self.precision][1]}
        return make_optimizer(model, self.optim, ranks, **backends, **options)

    def executed_kernels(self, shape: tuple[int, int], device: torch.device) -> dict[str, str | bool]:
        """Return op -> backend and version, for tokens of shape (B, T)."""
        return executed_kernels(*self.groups, shape, device, documents=self.documents)

    def kernel_facts(self, shape: tuple[int, int], device: torch.device, optimizer: Optimizer) -> dict[str, dict]:
        """Return the keys of the row about the kernels of a training step: what ran, and what is slower than eager."""
        kernels = self.executed_kernels(shape, device) | optimizer.kernels
        slower = slower_kernels(*self.groups, shape, device, documents=self.documents, trains=True)
        return {"kernels": kernels, "slower": slower}
