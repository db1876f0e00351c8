"""What the compilers did in this process: graphs, graph breaks, and hits of their caches on the disk."""

import sys

import torch

from runtime import compat


def reset() -> None:
    """Drop everything that torch.compile has compiled, and set all counts to zero.

    With hydra/launcher=basic all jobs of a sweep run in this process, and Dynamo compiles a function at most 8 times.
    """
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import of Dynamo takes 1.5 s
        torch.compiler.reset()
    compat.reset_compile_counters()


def graphs() -> int:
    """Return the number of graphs that torch.compile has made."""
    return compat.compile_counters()["stats"]["unique_graphs"]


def graph_breaks() -> int:
    """Return the number of places at which torch.compile ended a graph and continued in Python."""
    return sum(compat.compile_counters()["graph_break"].values())


def cache_state() -> str | None:
    """Return `warm` if all compiled code came from caches on the disk, or `cold`. None if nothing was compiled."""
    counters = compat.compile_counters()
    inductor, kernels = counters["inductor"], compat.triton_cache + compat.fa4_cache()
    misses = kernels["miss"] + inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    hits = kernels["hit"] + inductor["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    if misses:
        return "cold"
    return "warm" if hits else None
