"""The choice of the optimizer, and of the backends that it calls."""

import torch
from torch import Tensor, nn

from kernels import muon as muon_op
from kernels.adamw import MULTIPLE, auto
from kernels.gpu import triton_unavailable
from kernels.muon import auto as muon_auto
from kernels.registry import Unavailable, describe, load
from model.flat_adamw import FlatAdamW
from model.muon import FlatMuon, Muon
from model.optim import OptimConfig, Optimizer, TorchAdamW
from runtime.ranks import Ranks, is_sharded


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

    `auto` is eager for weights that FlatAdamW does not take. With optim=muon it returns Muon instead of TorchAdamW, and
    FlatMuon instead of FlatAdamW. `muon` is the backend of that op, which computes in `dtype`. `options` are
    Optimizer's. Raises Unavailable if a backend cannot run here.
    """
    weight = next(model.parameters())
    uses_muon = config.name == "muon"
    if uses_muon and is_sharded(weight):
        raise Unavailable("optim=muon needs whole matrices: choose parallel=ddp or context, or optim=adamw")
    name, reason = impl, flat_unavailable(weight, uses_muon)
    if impl == "auto":
        name = "eager" if reason else auto.choose(weight.device)
    if name != "eager" and reason:
        raise Unavailable(f"adamw={name} cannot run here: {reason}")
    adamw = None if name == "eager" else load("adamw", name, weight.device)
    names = {"adamw": describe("adamw", impl, chosen=name, shape=(MULTIPLE,), dtype=weight.dtype, device=weight.device)}
    if uses_muon:
        chosen = muon_auto.choose(weight.device) if muon == "auto" else muon
        shape = {"shape": next(iter(muon_op.SIZES.values()))["shape"], "dtype": dtype, "device": weight.device}
        function = load("muon", chosen, weight.device)
        names["muon"] = describe("muon", muon, chosen=chosen, **shape)
        if adamw:
            optimizer = FlatMuon(model, config, adamw, function, ranks, dtype, **options)
        else:
            optimizer = Muon(model, config, function, ranks, dtype=dtype, **options)
    elif adamw:
        optimizer = FlatAdamW(model, config, adamw, ranks, **options)
    else:
        optimizer = TorchAdamW(model, config, ranks, **options)
    optimizer.kernels = names
    return optimizer


def make_reference_optimizer(
    model: nn.Module, config: OptimConfig, rounded: torch.dtype, dtype: torch.dtype
) -> Optimizer:
    """Return the config's optimizer in eager PyTorch, for lab/proof. See TorchAdamW for `rounded`, Muon for `dtype`."""
    if config.name == "muon":
        device = next(model.parameters()).device
        return Muon(model, config, load("muon", "eager", device), rounded=rounded, dtype=dtype)
    return TorchAdamW(model, config, rounded=rounded)


def flat_unavailable(weight: Tensor, uses_muon: bool) -> str | None:
    """Return why FlatAdamW, or FlatMuon, cannot update a model with such weights, or None if it can."""
    if is_sharded(weight):
        return "only kernels.adamw=eager updates sharded weights (parallel=fsdp or zero2)"
    if weight.dtype == torch.float32:
        return "only kernels.adamw=eager updates fp32 weights: choose it, or precision=bf16"
    if uses_muon and (reason := triton_unavailable(weight.device)):
        return f"with optim=muon {reason}"
    return None
