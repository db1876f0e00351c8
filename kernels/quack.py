"""The matmuls of QuACK in CuTe DSL (https://github.com/Dao-AILab/quack), for the backends `quack` that multiply.

Each matmul has the tile that QuACK takes by default. With tuned=True, QuACK would time dozens of tiles in the middle of
the first step. As in QuACK's own layers, the programs of a backward take their tiles from a counter
(dynamic_scheduler). One program still computes all of a tile, so two calls give the same bits.

TMA needs rows that begin at multiples of 16 bytes. So every width must be a multiple of 8, and align() copies a tensor
whose address is not a multiple of 16. The number of rows is free.
"""

import functools
import textwrap
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kernels.gpu import gpu_unavailable, package_unavailable

PACKAGE = "quack-kernels[cu13]>=0.6.5"
MATMULS = "(?i)quack.*gemm"  # the names of the kernels in a profile


def unavailable(device: torch.device, symbols: Iterable[str] = ()) -> str | None:
    """Return why QuACK's matmuls cannot run on `device`, or which of `symbols` QuACK lacks, or None.

    `symbols`, written "quack.module.name", are what a backend needs beyond the matmuls below.
    """
    missing = package_unavailable(PACKAGE, "quack.gemm_interface.gemm_dact")
    if reason := missing or gpu_unavailable(device, (9, 0)) or location_unavailable():
        return reason
    return next(filter(None, (package_unavailable(PACKAGE, symbol) for symbol in symbols)), None)


@functools.cache
def location_unavailable() -> str | None:
    """Return why QuACK cannot import its own epilogues from the folder where it is, or None if it can.

    QuACK hashes the source of each function that an epilogue calls, except functions of other packages whose path
    contains site-packages or dist-packages. Elsewhere it also hashes CuTe DSL's source, finds a logger there and raises
    TypeError.
    """
    try:
        return package_unavailable(PACKAGE, "quack.epilogue.library.identity_epi")
    except TypeError as error:
        why = textwrap.shorten(str(error), 60, placeholder=" ...")
        return f"it needs QuACK and CuTe DSL in a folder site-packages ({why}): move them, or pip install '{PACKAGE}'"


def detail(**inputs: Any) -> str:
    return f"quack-kernels {version('quack-kernels')}, cutlass-dsl {version('nvidia-cutlass-dsl')}"


def matmul(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """Return a (m, k) @ b (k, n). Options: bias (n,), out, dynamic_scheduler, concat_layout."""
    from quack.gemm_interface import gemm

    return gemm(a, b, tuned=False, **options)


def matmul_and_activation(a: Tensor, b: Tensor, activation: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Return h = a (m, k) @ b (k, n) and activation(h). Options: bias (n,), concat_layout."""
    from quack.gemm_interface import gemm_act

    return gemm_act(a, b, activation=activation, tuned=False, **options)


def matmul_and_derivative(dy: Tensor, w: Tensor, h: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return dh and activation(h). The gradient of activation(h) is dy (m, k) @ w (k, n)."""
    from quack.gemm_interface import gemm_dact

    return gemm_dact(dy, w, h, activation=activation, dynamic_scheduler=True, tuned=False)


backward_matmul = functools.partial(matmul, dynamic_scheduler=True)
