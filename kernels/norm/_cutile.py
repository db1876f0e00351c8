"""The kernels of cutile.py. Importing this file imports cuda.tile, which reads the source of these functions.

A tile beyond the edge of a tensor is filled with zeros, and its part beyond the edge is not stored. The flags are
constants: cuda.tile compiles only the branches that are taken, so an argument that no branch reads may be any tensor.
"""

import cuda.tile as ct

ZERO = ct.PaddingMode.ZERO
Flag, Size = ct.Constant[bool], ct.Constant[int]


def add_both(a: ct.Tile, b: ct.Tile, c: ct.Tile, d: ct.Tile) -> tuple[ct.Tile, ct.Tile]:
    return a + c, b + d


# With four blocks on a multiprocessor a thread has 64 registers, and nothing spills up to 4096 columns
@ct.kernel(occupancy=4)
def cutile_norm_fwd(
    x,  # (N, C)
    residual,  # (N, C), read only with HAS_RESIDUAL
    weight,  # (C,)
    bias,  # (C,), read only with HAS_BIAS
    y,  # (N, C)
    stream,  # (N, C) the new stream, written only with HAS_RESIDUAL
    mean,  # (N,) fp32, written only with CENTRED
    rstd,  # (N,) fp32
    eps: float,
    C: Size,
    BLOCK_C: Size,
    ROWS: Size,
    HAS_RESIDUAL: Flag,
    HAS_BIAS: Flag,
    CENTRED: Flag,  # False: RMSNorm
):
    row = ct.bid(0)
    total = ct.load(x, (row, 0), (ROWS, BLOCK_C), padding_mode=ZERO).astype(ct.float32)
    if HAS_RESIDUAL:
        total += ct.load(residual, (row, 0), (ROWS, BLOCK_C), padding_mode=ZERO).astype(ct.float32)
        rounded = total.astype(stream.dtype)
        ct.store(stream, (row, 0), rounded)
        total = rounded.astype(ct.float32)  # normalise the rounded sum, because the backward starts from it
    if CENTRED:
        average = ct.sum(total, 1, keepdims=True) / C
        in_row = ct.arange(BLOCK_C, dtype=ct.int32).reshape((1, BLOCK_C)) < C
        total = ct.where(in_row, total - average, 0.0)
        ct.store(mean, (row,), average.reshape((ROWS,)))
    scale = 1.0 / ct.sqrt(ct.sum(total * total, 1, keepdims=True) / C + eps)
    ct.store(rstd, (row,), scale.reshape((ROWS,)))
    out = total * scale
    out *= ct.load(weight, (0,), (BLOCK_C,), padding_mode=ZERO).astype(ct.float32).reshape((1, BLOCK_C))
    if HAS_BIAS:
        out += ct.load(bias, (0,), (BLOCK_C,), padding_mode=ZERO).astype(ct.float32).reshape((1, BLOCK_C))
    ct.store(y, (row, 0), out.astype(y.dtype))


@ct.kernel(occupancy=2)
def cutile_norm_bwd(
    dy,  # (N, C)
    dstream,  # (N, C), read only with HAS_DSTREAM
    stream,  # (N, C)
    weight,  # (C,)
    mean,  # (N,) fp32, read only with CENTRED
    rstd,  # (N,) fp32
    dx,  # (N, C)
    dresidual,  # (N, C), written only with HAS_DRESIDUAL
    dweight,  # (programs, C) fp32, a partial sum from each program
    dbias,  # (programs, C) fp32, written only with HAS_BIAS
    C: Size,
    BLOCK_C: Size,
    ROWS: Size,
    HAS_DSTREAM: Flag,
    HAS_BIAS: Flag,
    HAS_DRESIDUAL: Flag,
    CENTRED: Flag,
):
    w = ct.load(weight, (0,), (BLOCK_C,), padding_mode=ZERO).astype(ct.float32).reshape((1, BLOCK_C))
    in_row = ct.arange(BLOCK_C, dtype=ct.int32).reshape((1, BLOCK_C)) < C
    sum_weight = ct.zeros((ROWS, BLOCK_C), dtype=ct.float32)
    sum_bias = ct.zeros((ROWS, BLOCK_C), dtype=ct.float32)
    for row in range(ct.bid(0), ct.num_tiles(stream, 0, (ROWS, BLOCK_C)), ct.num_blocks(0)):
        d = ct.load(dy, (row, 0), (ROWS, BLOCK_C), padding_mode=ZERO).astype(ct.float32)
        xhat = ct.load(stream, (row, 0), (ROWS, BLOCK_C), padding_mode=ZERO).astype(ct.float32)
        scale = ct.load(rstd, (row,), (ROWS,), padding_mode=ZERO).reshape((ROWS, 1))
        if CENTRED:
            average = ct.load(mean, (row,), (ROWS,), padding_mode=ZERO).reshape((ROWS, 1))
            xhat = ct.where(in_row, xhat - average, 0.0)
        xhat = xhat * scale
        sum_weight += d * xhat
        if HAS_BIAS:
            sum_bias += d
        g = d * w
        if CENTRED:
            # one reduction: warps wait for each other once
            total_g, total_gx = ct.reduce((g, g * xhat), 1, add_both, (0.0, 0.0), keepdims=True)
            out = g - xhat * (total_gx / C) - total_g / C
        else:
            out = g - xhat * (ct.sum(g * xhat, 1, keepdims=True) / C)
        out = out * scale
        if HAS_DSTREAM:
            out += ct.load(dstream, (row, 0), (ROWS, BLOCK_C), padding_mode=ZERO).astype(ct.float32)
        ct.store(dx, (row, 0), out.astype(dx.dtype))
        if HAS_DRESIDUAL:
            ct.store(dresidual, (row, 0), out.astype(dresidual.dtype))
    ct.store(dweight, (ct.bid(0), 0), ct.sum(sum_weight, 0, keepdims=True))
    if HAS_BIAS:
        ct.store(dbias, (ct.bid(0), 0), ct.sum(sum_bias, 0, keepdims=True))
