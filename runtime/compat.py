"""The private parts of other libraries that this room uses, and why.

Checked with torch 2.11 and 2.13, triton 3.6 and 3.9, hydra-core 1.3. tests/runtime/test_compat.py fails if one of them
changes, or is no longer needed.
"""

import argparse
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from types import ModuleType

import torch
from hydra.core.plugins import Plugins
from torch import Tensor

triton_cache = Counter()  # "hit" and "miss": whether Triton found a kernel in its cache on the disk


def reset_compile_counters() -> None:
    """Set the counts of compilations to zero, and count the hits and misses of Triton's cache too.

    torch.compile has no public counters. Triton calls the listener each time that it needs a compiled kernel.
    """
    compile_counters().clear()
    triton_cache.clear()
    if find_spec("triton"):
        from triton import knobs

        knobs.compilation.listener = lambda *, cache_hit, **_: triton_cache.update(["hit" if cache_hit else "miss"])


def compile_counters() -> dict[str, Counter]:
    """Return torch.compile's counters: "stats", "graph_break", "inductor", "aot_autograd".

    They are empty until something imports Dynamo. This function does not, because the import takes 1.5 s.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters if dynamo else defaultdict(Counter)


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the target at the same place of the list, with one kernel launch for many tensors.

    A loop over copy_() launches a kernel for each tensor, 148 for GPT-2 124M. torch.optim uses the foreach functions,
    but they have no public names.
    """
    torch._foreach_copy_(targets, sources)


def sleep_on_gpu(seconds: float) -> None:
    """Keep the current stream of the current GPU busy for about `seconds`. The host does not wait.

    The only public way is a kernel that takes this long. The private function takes a number of clocks. An H200 has
    1.98e9 clocks a second, and a slower GPU sleeps longer.
    """
    torch.cuda._sleep(int(2e9 * seconds))


def shorten_argparse_errors() -> None:
    """Print one line for an argument that Hydra's parser refuses.

    argparse also prints the usage, which takes 8 lines, and hydra.main gives no access to its parser (hydra-core 1.3).
    """
    argparse.ArgumentParser.error = lambda _, message: sys.exit(f"error: {message}")


def register_hydra_plugins(module: ModuleType, *plugins: type) -> None:
    """Let Hydra use the launcher and the sweeper in `module`, under the name hydra_plugins.hotswap.

    Hydra 1.3 accepts plugins from the package hydra_plugins only. That package exists if other plugins are installed.
    """
    registry = Plugins.instance()  # imports hydra_plugins if it exists
    sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins")).hotswap = module
    for plugin in plugins:
        registry.register(plugin)
