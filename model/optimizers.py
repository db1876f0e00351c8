"""Choose the optimizer: one that updates flat bf16 weights with a kernel, or PyTorch's AdamW."""

import torch
from torch import Tensor, nn

from kernels.adamw import MULTIPLE, auto
from kernels.registry import Unavailable, describe, load
from model.flat_adamw import FlatAdamW
from model.optim import OptimConfig, Optimizer, TorchAdamW
from runtime.ranks import Ranks, is_sharded


def make_optimizer(
    model: nn.Module, config: OptimConfig, ranks: Ranks | None = None, impl: str = "auto", **options: bool
) -> Optimizer:
    """Return the optimizer for the backend `impl` of the op adamw: TorchAdamW for eager, FlatAdamW for all others.

    `auto` is eager for weights that FlatAdamW does not take. `options` are Optimizer's. Raises Unavailable if the
    backend cannot run here.
    """
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
    shape = {"shape": (MULTIPLE,), "dtype": weight.dtype, "device": weight.device}
    optimizer.kernel = describe("adamw", impl, chosen=name, **shape)
    return optimizer


def flat_unavailable(weight: Tensor) -> str | None:
    """Return why FlatAdamW cannot update a model with such weights, or None if it can."""
    if is_sharded(weight):
        return "only kernels.adamw=eager updates sharded weights (parallel=fsdp or zero2)"
    if weight.dtype == torch.float32:
        return "only kernels.adamw=eager updates fp32 weights: choose it, or precision=bf16"
    return None
