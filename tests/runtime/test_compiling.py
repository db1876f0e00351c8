"""What compilers' own counts come to."""

import pytest
from torch._dynamo.utils import counters

from runtime import compiling


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
def test_whether_caches_were_filled(inductor, triton, expected):
    compiling.watch()
    assert (compiling.cache(), compiling.graphs(), compiling.breaks()) == (None, 0, 0)
    counters["inductor"].update(inductor)
    if triton:
        knobs = pytest.importorskip("triton").knobs
        for hit in triton:  # as Triton calls its listener
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert compiling.cache() == expected
    compiling.watch()


def test_a_break_is_counted():
    import torch

    @torch.compile(backend="eager")
    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    compiling.watch()
    broken(torch.ones(2))
    assert (compiling.graphs(), compiling.breaks()) == (2, 1)
