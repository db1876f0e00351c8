"""How torch.compile compiles a decoding step."""

from collections.abc import Callable

import torch
from torch import Tensor

from model import compat


def inductor(graph: torch.fx.GraphModule, examples: list) -> Callable:
    """Compile a graph as torch.compile's backend: Inductor, with linear layers of one row (B = 1) as sums.

    A sum fuses with other ops. With coordinate_descent_tuning, Inductor itself makes sums of linear layers without a
    bias, on a GPU. `graph` and `examples` come from torch.compile.
    """
    decompositions = {torch.ops.aten.addmm.default: addmm_of_one_row}
    return compat.compile_graph(graph, examples, decompositions, {"coordinate_descent_tuning": True})


def addmm_of_one_row(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return x (1, K) @ weight (K, N) + bias (N,) as a sum in fp32. For other shapes return NotImplemented (addmm)."""
    if x.shape[0] != 1 or (beta, alpha) != (1, 1):
        return NotImplemented
    return ((x.float().unsqueeze(2) * weight.float().unsqueeze(0)).sum(1) + bias.float()).to(x.dtype)
