"""The kernels of helion.py. Importing this file imports Helion, which reads the source of these functions."""

import functools
from collections.abc import Callable

import helion
import helion.language as hl
import torch


def norm_fwd(x, residual, weight, bias, eps, y, stream, mean, rstd):
    """Write y, the new stream (if there is a residual), mean and rstd for x and residual (N, C).

    If mean is None, it is RMSNorm.
    """
    C = hl.specialize(x.size(1))
    for rows in hl.tile(x.size(0)):
        h = x[rows, :].to(torch.float32)
        if residual is not None:
            h = (h + residual[rows, :].to(torch.float32)).to(stream.dtype)
            stream[rows, :] = h
            h = h.to(torch.float32)
        if mean is not None:
            row_mean = torch.sum(h, dim=-1) / C
            h = h - row_mean[:, None]
            mean[rows] = row_mean
        row_rstd = 1 / torch.sqrt(torch.sum(h * h, dim=-1) / C + eps)
        normalized = h * row_rstd[:, None] * weight[:].to(torch.float32)[None, :]
        if bias is not None:
            normalized = normalized + bias[:].to(torch.float32)[None, :]
        y[rows, :] = normalized.to(y.dtype)
        rstd[rows] = row_rstd


def norm_bwd(dy, dstream, stream, weight, mean, rstd, dx, dresidual, dweight, dbias):
    """Write dx and the sums (programs, C) in fp32 of each program's rows, dweight and dbias.

    dresidual is like dx in another dtype. dresidual and dbias may be None. If mean is None, it is RMSNorm.
    """
    C = hl.specialize(stream.size(1))
    block = hl.register_block_size(stream.size(0))
    for program in hl.tile(stream.size(0), block_size=block):
        dweight_sum = hl.zeros([C], dtype=torch.float32)
        dbias_sum = hl.zeros([C], dtype=torch.float32)
        for rows in hl.tile(program.begin, program.end):
            dout = dy[rows, :].to(torch.float32)
            row_rstd = rstd[rows][:, None]
            xhat = stream[rows, :].to(torch.float32)
            if mean is not None:
                xhat = xhat - mean[rows][:, None]
            xhat = xhat * row_rstd
            dweight_sum += torch.sum(dout * xhat, dim=0)
            if dbias is not None:
                dbias_sum += torch.sum(dout, dim=0)
            g = dout * weight[:].to(torch.float32)[None, :]
            gradient = g - xhat * (torch.sum(g * xhat, dim=-1)[:, None] / C)
            if mean is not None:
                gradient = gradient - torch.sum(g, dim=-1)[:, None] / C
            gradient = row_rstd * gradient
            if dstream is not None:
                gradient = gradient + dstream[rows, :].to(torch.float32)
            dx[rows, :] = gradient.to(dx.dtype)
            if dresidual is not None:
                dresidual[rows, :] = gradient.to(dresidual.dtype)
        dweight[program.id, :] = dweight_sum
        if dbias is not None:
            dbias[program.id, :] = dbias_sum


@functools.cache
def kernel(function: Callable, block_sizes: tuple[int, ...], num_warps: int) -> Callable:
    """Return the Helion kernel of one of the functions above. A config is given, so Helion does not tune it."""
    config = helion.Config(block_sizes=list(block_sizes), num_warps=num_warps)
    return helion.kernel(function, config=config, static_shapes=False)
