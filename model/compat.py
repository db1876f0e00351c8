"""The private parts of PyTorch that model/ uses, and why.

tests/model/test_compat.py fails when one of them breaks, and when one is no longer needed. pyproject.toml lists the
tested versions.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.compat import inductor_options


def add_tensors(targets: list[Tensor], terms: list[Tensor]) -> None:
    """Add each term to its target, which may have another dtype. See copy_tensors() in runtime/torch_compat.py."""
    torch._foreach_add_(targets, terms)


def compile_graph(graph: torch.fx.GraphModule, examples: list, decompositions: dict, mode: str = "default") -> Callable:
    """Compile a graph with Inductor, tuned, with `decompositions` (operator -> function) added to its own.

    torch.compile passes no decompositions to Inductor.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx  # this import takes 2 s
    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table(), **decompositions}
    # The key of AOTAutograd's cache does not contain the table, so the cache would return code made with another table
    with config.patch(enable_autograd_cache=False):
        options = {"coordinate_descent_tuning": True, **inductor_options(mode)}
        return compile_fx(graph, examples, config_patches=options, decompositions=table)


@functools.cache
def inductor(mode: str) -> Callable:
    """Return torch.compile's backend for a decoding step: Inductor, with linear layers of one row (B = 1) as sums.

    A sum fuses with other ops. With coordinate_descent_tuning, Inductor itself does this without a bias, on a GPU.
    """
    decompositions = {torch.ops.aten.addmm.default: addmm_of_one_row}
    return lambda graph, examples: compile_graph(graph, examples, decompositions, mode)


def addmm_of_one_row(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return x (1, K) @ weight (K, N) + bias (N,) as a sum in fp32. For other shapes return NotImplemented (addmm)."""
    if x.shape[0] != 1 or (beta, alpha) != (1, 1):
        return NotImplemented
    return ((x.float().unsqueeze(2) * weight.float().unsqueeze(0)).sum(1) + bias.float()).to(x.dtype)
