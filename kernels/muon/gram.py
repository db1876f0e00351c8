"""Gram Newton-Schulz (Zhang, Amsel, Chen and Dao 2026, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/).

The five steps multiply X by polynomials of A = X X^T. So this iterates on the (m, m) matrix A, and multiplies the
(m, k) matrix X only twice. The symmetric products are QuACK's, in CuTe DSL. All products are in float16, whose rounding
is 8 times as fine as bfloat16's. In half precision, A loses the small singular values. So after RESTART steps A is
computed again from X; the package's own search finds this step for COEFFICIENTS. Square matrices take the plain steps.

The package captures CUDA graphs by default; here the graph of the whole training step contains the calls.
"""

import functools
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.muon import COEFFICIENTS, RESTART, STEPS
from kernels.registry import Unavailable

PACKAGE = "gram-newton-schulz==0.1.6"  # it needs QuACK 0.5.0, and kernels/norm/quack.py a newer one
RUNS = ("(?i)gemm.*symmetric|symmetric.*gemm|::muon_gram",)


def unavailable(device: torch.device) -> str | None:
    for symbol in ("gram_newton_schulz.GramNewtonSchulz", "quack.gemm_interface.gemm_symmetric"):
        if missing := package_unavailable(PACKAGE, symbol):
            return missing
    return gpu_unavailable(device, (9, 0))


def detail(**inputs: Any) -> str:
    return f"gram-newton-schulz {version('gram-newton-schulz')}, quack-kernels {version('quack-kernels')}"


@functools.cache
def newton_schulz() -> Any:
    from gram_newton_schulz import GramNewtonSchulz

    return GramNewtonSchulz(
        ns_coefficients=[list(COEFFICIENTS)] * STEPS,
        gram_newton_schulz_reset_iterations=[RESTART],
        compile_kwargs={"fullgraph": True},
    )


def compute(matrices: Tensor) -> Tensor:
    return newton_schulz()(matrices.contiguous()).contiguous()


orthogonalise = custom_op("hotswap::muon_gram", compute, lambda matrices: matrices.new_empty(matrices.shape))


def muon(matrices: Tensor) -> Tensor:
    if matrices.dtype != torch.bfloat16:
        raise Unavailable(f"muon=gram takes bfloat16, not {matrices.dtype}: choose kernels.muon=eager")
    return orthogonalise(matrices)
