"""NVIDIA's cuTile (https://github.com/NVIDIA/cutile-python), for the backends `cutile`: where it runs, and launches.

A kernel in cuTile is a Python function of one block. It loads, computes and stores whole tiles, whose sizes are powers
of two, and names neither threads nor shared memory. cuda.tile writes it as Tile IR, and NVIDIA's compiler tileiras
chooses the rest: on Hopper, TMA, wgmma, and warps that only load.

The first launch with new dtypes or constants compiles for 1 to 2 s. So does the first one in which other sizes are
multiples of 16.
"""

import functools
import re
import subprocess
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kernels.gpu import gpu_unavailable, make_context_current, package_unavailable

PACKAGE = "cuda-tile>=1.7,<1.8"  # compiler_version() calls a private function
COMPILER = 13, 3  # the first version of tileiras that compiles for Hopper


def unavailable(device: torch.device) -> str | None:
    missing = package_unavailable(PACKAGE, "cuda.tile._compile._find_compiler_bin")
    return missing or gpu_unavailable(device) or compiler_unavailable()


def compiler_unavailable() -> str | None:
    """Return why cuda.tile cannot compile, or None if it can."""
    found = compiler_version()
    if found and tuple(map(int, found.split("."))) >= COMPILER:
        return None
    # cuda-tile[tileiras] pins another cuda-toolkit than torch 2.11
    lacks = f"and this is {found}" if found else "and cuda.tile finds none"
    return f"it needs tileiras of CUDA 13.3 or newer, {lacks}: pip install 'nvidia-cuda-tileiras>=13.3'"


@functools.cache
def compiler_version() -> str | None:
    """Return the version of the tileiras that cuda.tile uses, "13.4", or None if it finds none with a version."""
    from cuda.tile._compile import _find_compiler_bin  # no public function says where the compiler is

    try:
        path = _find_compiler_bin().path
    except FileNotFoundError:
        return None
    text = subprocess.run([path, "--version"], capture_output=True, encoding="utf-8").stdout
    found = re.search(r"release (\d+\.\d+)", text)
    return found and found[1]


def detail(**inputs: Any) -> str:
    return f"cuda-tile {version('cuda-tile')}, tileiras {compiler_version()}"


def launch(kernel: Any, grid: tuple[int, ...], /, **arguments: Any) -> None:
    """Launch a kernel in cuTile on PyTorch's current stream. `grid` is the number of blocks along each axis.

    The arguments are in the order of the kernel's parameters, because cuTile takes no names. It takes no None either,
    so an argument that the kernel does not read may be any tensor.
    """
    from cuda import tile

    make_context_current()
    # DLPack refuses a tensor that needs a gradient
    values = tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments.values())
    tile.launch(torch.cuda.current_stream(), grid, kernel, values)
