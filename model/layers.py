"""The layers whose weights are cast to the compute dtype where they are used, whatever dtype they are stored in."""

import torch
from torch import Tensor, nn

from kernels.registry import Ops, norm_before
from model.config import EPS, GPTConfig


def cast(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else weight.to(dtype)


class Linear(nn.Linear):
    """y = x W^T + b in x's dtype, whatever dtype the weights are stored in."""

    def __init__(self, ops: Ops, in_features: int, out_features: int, bias: bool):
        super().__init__(in_features, out_features, bias)
        self.linear = ops.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, cast(self.weight, x.dtype), cast(self.bias, x.dtype))


class Norm(nn.Module):
    """(x, residual) -> (y, residual + x), all (B, T, C).

    y is LayerNorm or RMSNorm of residual + x, in the compute dtype. If `next_op` reads fp8, it is in fp8 (InFp8 of
    kernels/fp8.py). RMSNorm has no bias.
    """

    def __init__(self, config: GPTConfig, ops: Ops, dtype: torch.dtype, next_op: str | None = None):
        super().__init__()
        self.dtype = dtype
        self.options = {} if config.norm_eps == EPS else {"eps": config.norm_eps}  # a backend need not take eps
        self.op = "norm" if config.norm == "layernorm" else "rms_norm"
        self.norm = norm_before(next_op, ops, getattr(ops, self.op))
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias and self.op == "norm" else None

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.norm(x, residual, *self.parameters_in_dtype(), **self.options)

    def parameters_in_dtype(self) -> tuple[Tensor | None, ...]:
        """Return the op's parameters in the compute dtype: weight and bias; with RMSNorm only the weight."""
        weight = cast(self.weight, self.dtype)
        return (weight, cast(self.bias, self.dtype)) if self.op == "norm" else (weight,)
