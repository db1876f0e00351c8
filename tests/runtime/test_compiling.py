"""The counts of graphs, graph breaks and cache hits."""

import sys
from types import SimpleNamespace

import pytest
import torch

from runtime import compat, compiling


@pytest.mark.parametrize(
    ("inductor", "triton", "expected"),
    [
        ({}, [], None),
        ({"fxgraph_cache_hit": 2}, [], "warm"),
        ({"fxgraph_cache_hit": 2}, [True, True], "warm"),
        ({}, [True], "warm"),
        ({"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}, [], "cold"),
        ({"fxgraph_cache_bypass": 1}, [], "cold"),
        ({"fxgraph_cache_hit": 2}, [True, False], "cold"),
    ],
)
def test_cache_state_is_cold_when_a_compiler_missed_its_cache(inductor, triton, expected):
    pytest.importorskip("torch._dynamo.utils")  # it holds the counters; this test may be the first that needs them
    compiling.reset()
    assert (compiling.cache_state(), compiling.graphs(), compiling.graph_breaks()) == (None, 0, 0)
    compat.compile_counters()["inductor"].update(inductor)
    if triton:
        knobs = pytest.importorskip("triton").knobs
        for hit in triton:  # as Triton calls its listener
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert compiling.cache_state() == expected
    compiling.reset()


class Compiled:
    """A kernel that FlashAttention-4 has compiled, and not read from the disk."""

    def export_to_c(self):
        """Write the kernel."""


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [([], None), ([object()], "warm"), ([Compiled()], "cold"), ([object(), Compiled()], "cold")],
)
def test_the_cache_of_flash_attention_4_counts(kernels, expected, monkeypatch):
    """Kernels of an earlier run in this process do not count."""
    forward = SimpleNamespace(compile_cache=SimpleNamespace(cache={"earlier": Compiled()}))
    module = SimpleNamespace(_flash_attn_fwd=forward, other=None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    compiling.reset()
    assert compiling.cache_state() is None
    forward.compile_cache.cache.update(enumerate(kernels))
    assert compiling.cache_state() == expected
    compiling.reset()


def test_a_graph_break_is_counted():
    @torch.compile(backend="eager")
    def two_graphs(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    compiling.reset()
    two_graphs(torch.ones(2))
    assert (compiling.graphs(), compiling.graph_breaks()) == (2, 1)
