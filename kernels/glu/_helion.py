"""The kernels of helion.py. Importing this file imports Helion, which reads the source of these functions."""

import functools
from collections.abc import Callable

import helion
import helion.language as hl
import torch


def swiglu_fwd(h, a):
    """Write a = silu(gate) up, (N, F), for h (N, 2, F): gate and up."""
    F = hl.specialize(a.size(1))
    for rows, columns in hl.tile([a.size(0), F]):
        gate, up = h[rows, 0, columns].to(torch.float32), h[rows, 1, columns].to(torch.float32)
        a[rows, columns] = (gate * torch.sigmoid(gate) * up).to(a.dtype)


def swiglu_bwd(da, h, dh):
    """Write dh (N, 2, F), the gradient of h, for that of a, da (N, F)."""
    F = hl.specialize(da.size(1))
    for rows, columns in hl.tile([da.size(0), F]):
        gate, up = h[rows, 0, columns].to(torch.float32), h[rows, 1, columns].to(torch.float32)
        gradient, s = da[rows, columns].to(torch.float32), torch.sigmoid(gate)
        dh[rows, 0, columns] = (gradient * up * s * (1 + gate * (1 - s))).to(dh.dtype)
        dh[rows, 1, columns] = (gradient * gate * s).to(dh.dtype)


@functools.cache
def kernel(function: Callable, block_sizes: tuple[int, int], num_warps: int) -> Callable:
    """Return the Helion kernel of one of the functions above. A config is given, so Helion does not tune it."""
    config = helion.Config(block_sizes=list(block_sizes), num_warps=num_warps)
    return helion.kernel(function, config=config, static_shapes=False)
