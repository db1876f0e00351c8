"""The private parts of PyTorch that model/ uses, and why.

tests/model/test_compat.py fails when one of them breaks, and when one is no longer needed. pyproject.toml lists the
tested versions.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def add_tensors(targets: list[Tensor], terms: list[Tensor]) -> None:
    """Add each term to its target, which may have another dtype. See copy_tensors() in runtime/torch_compat.py."""
    torch._foreach_add_(targets, terms)


def compile_graph(graph: torch.fx.GraphModule, examples: list, decompositions: dict, options: dict) -> Callable:
    """Compile a graph as Inductor does, with `decompositions` (operator -> function) added to its own, and `options`.

    torch.compile(options=...) passes options to Inductor, but no decompositions.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx  # this import takes 2 s
    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table(), **decompositions}
    # The key of AOTAutograd's cache does not contain the table, so the cache would return code made with another table
    with config.patch(enable_autograd_cache=False):
        return compile_fx(graph, examples, config_patches=options, decompositions=table)
