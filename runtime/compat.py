"""The private parts of libraries other than PyTorch that this room uses, and why. For PyTorch see torch_compat.py.

This file does not import torch, because --help needs it and has to be quick. tests/runtime/test_compat.py fails if one
of them changes, or is no longer needed.
"""

import argparse
import copy
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

from hydra._internal import config_repository
from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins

from common.terminal import printable

triton_cache = Counter()  # "hit" and "miss": whether Triton found a kernel in its cache on the disk
fa4_before: set[tuple] = set()  # the kernels that FlashAttention-4 had at the last reset_compile_counters()


def reset_compile_counters() -> None:
    """Set the counts of compilations to zero, and count the hits and misses of Triton's and FA4's cache too.

    torch.compile has no public counters. Triton calls the listener each time that it needs a compiled kernel.
    """
    compile_counters().clear()
    triton_cache.clear()
    fa4_before.clear()
    fa4_before.update(fa4_kernels())
    if find_spec("triton"):
        from triton import knobs

        knobs.compilation.listener = lambda *, cache_hit, **_: triton_cache.update(["hit" if cache_hit else "miss"])


def compile_counters() -> dict[str, Counter]:
    """Return torch.compile's counters; they are empty before the import of Dynamo, which takes 1.5 s."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters if dynamo else defaultdict(Counter)


def fa4_cache() -> Counter:
    """Return how many kernels FlashAttention-4 found in its cache on the disk ("hit"), and compiled ("miss").

    FA4 has no counters (4.0.0b36). Only a kernel that this process has compiled can be exported.
    """
    new = [kernel for key, kernel in fa4_kernels().items() if key not in fa4_before]
    return Counter("miss" if hasattr(kernel, "export_to_c") else "hit" for kernel in new)


def fa4_kernels() -> dict[tuple, object]:
    """Return the kernels that FlashAttention-4 has in memory; {} if nothing has imported it."""
    module = sys.modules.get("flash_attn.cute.interface")
    kernels = {}
    for name, function in vars(module).items() if module else ():
        if hasattr(function, "compile_cache"):
            kernels |= {(name, key): kernel for key, kernel in function.compile_cache.cache.items()}
    return kernels


def shorten_argparse_errors() -> None:
    """Print one line for an argument that Hydra's parser refuses. argparse also prints the usage, 8 lines."""
    argparse.ArgumentParser.error = lambda _, message: sys.exit(f"error: {printable(message)}")


def split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's flags in `words`, such as --config-dir=FOLDER, and the overrides. Exits if a flag is wrong.

    Hydra's parser (hydra-core 1.3) refuses overrides on both sides of a flag, and -m after an override.
    """
    arguments = vars(get_args_parser().parse_intermixed_args(words))
    overrides = arguments.pop("overrides")
    flags = ["-m"] if arguments.pop("multirun") else []
    for name, value in arguments.items():
        if value not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            flags.append(flag if value is True else f"{flag}={value}")
    return flags, overrides


def register_hydra_plugins(module: ModuleType, *plugins: type) -> None:
    """Let Hydra, which accepts plugins from the package hydra_plugins only, use the plugins in `module`."""
    registry = Plugins.instance()  # imports hydra_plugins if it exists
    sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins")).hotswap = module
    for plugin in plugins:
        registry.register(plugin)


def list_groups_quickly() -> None:
    """Let Hydra copy the list of its sources, and not all configs in them, each time that it lists a group.

    For --help it lists 100 groups, and the copies take half of the time (hydra-core 1.3). It changes only the list.
    """
    config_repository.copy = SimpleNamespace(deepcopy=copy.copy)
