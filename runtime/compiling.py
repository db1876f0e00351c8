"""What compilers did in this process: graphs, breaks, and whether they found their caches filled."""

from collections import Counter
from importlib.util import find_spec

from torch._dynamo.utils import counters

_triton = Counter()  # of Triton's kernels: "hit", "miss"


def watch() -> None:
    """Count from here on."""
    counters.clear()
    _triton.clear()
    if find_spec("triton"):
        from triton import knobs

        knobs.compilation.listener = lambda *, cache_hit, **_: _triton.update(["hit" if cache_hit else "miss"])


def graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    return counters["stats"]["unique_graphs"]


def breaks() -> int:
    """Places at which it cut a graph and went on in Python."""
    return sum(counters["graph_break"].values())


def cache() -> str | None:
    """warm: all that was compiled came from caches on the disk. cold: not all. None: nothing was compiled."""
    torch = counters["inductor"]
    misses = _triton["miss"] + torch["fxgraph_cache_miss"] + torch["fxgraph_cache_bypass"]
    hits = _triton["hit"] + torch["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    return "cold" if misses else "warm" if hits else None
