"""The kernels of cutile.py. Importing this file imports cuda.tile, which reads the source of these functions."""

import math

import cuda.tile as ct

from kernels.linear._cutile import place, product, product_of_columns

ZERO, NEG_INF = ct.PaddingMode.ZERO, ct.PaddingMode.NEG_INF
LOG2E = math.log2(math.e)  # exp(x) = exp2(LOG2E x); the hardware has only exp2
Flag, Size = ct.Constant[bool], ct.Constant[int]


def capped(logits: ct.Tile, softcap: float, CAPPED: bool) -> ct.Tile:
    """Return the logits in fp32, capped if CAPPED."""
    z = logits.astype(ct.float32)
    if CAPPED:
        z = ct.tanh(z * (1.0 / softcap)) * softcap
    return z


@ct.kernel(num_worker_warps=8)
def cutile_cross_entropy_logits(
    x,  # (n, C)
    w,  # (V, C)
    logits,  # (n, V)
    tile_lse,  # (tiles along V, n) fp32: of each row and tile, log2 of the sum of exp(capped logit)
    softcap: float,  # read only with CAPPED
    BLOCK_N: Size,
    BLOCK_V: Size,
    BLOCK_C: Size,
    GROUP: Size,
    CAPPED: Flag,
):
    """Write the logits x w^T, before the cap, and what the softmax needs of each tile."""
    tiles_n, tiles_v = ct.num_tiles(logits, 0, (BLOCK_N, BLOCK_V)), ct.num_tiles(logits, 1, (BLOCK_N, BLOCK_V))
    V, column = logits.shape[1], ct.arange(BLOCK_V, dtype=ct.int32).reshape((1, BLOCK_V))
    for tile in range(ct.bid(0), tiles_n * tiles_v, ct.num_blocks(0)):
        n, v = place(tile, tiles_n, tiles_v, GROUP)
        rounded = product(x, w, n, v, BLOCK_N, BLOCK_V, BLOCK_C, True).astype(logits.dtype)
        ct.store(logits, (n, v), rounded)
        z = capped(rounded, softcap, CAPPED)  # of the rounded logits, so that the softmax sums to 1
        if (v + 1) * BLOCK_V > V:
            z = ct.where(column < V - v * BLOCK_V, z, -math.inf)
        largest = ct.max(z, 1, keepdims=True) * LOG2E
        total = ct.sum(ct.exp2(z * LOG2E - largest, flush_to_zero=True), 1, keepdims=True)
        ct.store(tile_lse, (v, n), (largest + ct.log2(total)).reshape((1, BLOCK_N)))


@ct.kernel
def cutile_cross_entropy_loss(
    logits,  # (n, V)
    tile_lse,  # (tiles along V, n) fp32
    targets,  # (n,) int64
    losses,  # (n,) fp32
    lse,  # (n,) fp32: log2 of the sum of a row, and infinity for an ignored row
    ignore_index: int,
    softcap: float,  # read only with CAPPED
    TILES: Size,
    ROWS: Size,
    CAPPED: Flag,
):
    """Write the losses: 0 if the target is ignore_index, and NaN if it is outside the vocabulary."""
    row = ct.bid(0)
    parts = ct.load(tile_lse, (0, row), (TILES, ROWS), padding_mode=NEG_INF)
    largest = ct.max(parts, 0, keepdims=True)
    total = ct.sum(ct.exp2(parts - largest, flush_to_zero=True), 0, keepdims=True)
    row_lse = (largest + ct.log2(total)).reshape((ROWS,))
    target = ct.load(targets, (row,), (ROWS,), padding_mode=ZERO)
    ignored = target == ignore_index
    at_target = ct.gather(logits, (ct.arange(ROWS, dtype=ct.int32) + row * ROWS, target), padding_value=math.nan)
    loss = row_lse * (1.0 / LOG2E) - capped(at_target, softcap, CAPPED)
    ct.store(losses, (row,), ct.where(ignored, 0.0, loss))
    ct.store(lse, (row,), ct.where(ignored, math.inf, row_lse))


@ct.kernel
def cutile_cross_entropy_gradient(
    logits,  # (n, V)
    targets,  # (n,) int64
    lse,  # (n,) fp32
    ignore_index: int,
    softcap: float,  # read only with CAPPED
    ROWS: Size,
    COLUMNS: Size,
    CAPPED: Flag,
):
    """Overwrite the logits with the gradient of the sum of the losses."""
    row, v = ct.bid(1), ct.bid(0)
    z = ct.load(logits, (row, v), (ROWS, COLUMNS), padding_mode=ZERO).astype(ct.float32)
    if CAPPED:
        tanh = ct.tanh(z * (1.0 / softcap))
        z = tanh * softcap
    row_lse = ct.load(lse, (row,), (ROWS,), padding_mode=ZERO).reshape((ROWS, 1))
    d = ct.exp2(z * LOG2E - row_lse, flush_to_zero=True)
    target = ct.load(targets, (row,), (ROWS,), padding_mode=ZERO)
    column = ct.where(target == ignore_index, -1, target).astype(ct.int32).reshape((ROWS, 1)) - v * COLUMNS
    d -= ct.where(ct.arange(COLUMNS, dtype=ct.int32).reshape((1, COLUMNS)) == column, 1.0, 0.0)
    if CAPPED:
        d *= 1.0 - tanh * tanh
    ct.store(logits, (row, v), d.astype(logits.dtype))


# Named apart from the matmuls of kernels/linear/_cutile.py, because a run's proof attributes its kernels by name
@ct.kernel(num_worker_warps=8)
def cutile_cross_entropy_dx(
    d,  # (n, V), the gradient of the logits
    w,  # (V, C)
    dx,  # (n, C)
    BLOCK_N: Size,
    BLOCK_C: Size,
    BLOCK_V: Size,
    GROUP: Size,
):
    """Write dx = d w."""
    tiles_n, tiles_c = ct.num_tiles(dx, 0, (BLOCK_N, BLOCK_C)), ct.num_tiles(dx, 1, (BLOCK_N, BLOCK_C))
    for tile in range(ct.bid(0), tiles_n * tiles_c, ct.num_blocks(0)):
        n, c = place(tile, tiles_n, tiles_c, GROUP)
        ct.store(dx, (n, c), product(d, w, n, c, BLOCK_N, BLOCK_C, BLOCK_V, False).astype(dx.dtype))


@ct.kernel(num_worker_warps=8)
def cutile_cross_entropy_dweight(
    d,  # (n, V), the gradient of the logits
    x,  # (n, C)
    dweight,  # (V, C) fp32
    BLOCK_N: Size,  # tokens that are added at once
    BLOCK_V: Size,
    BLOCK_C: Size,
    GROUP: Size,
    ADD: Flag,
):
    """Write dweight = d^T x, or with ADD add it to dweight.

    The L2 cache adds. If a block loaded dweight instead, each step of the loop would wait for its wgmma (tileiras
    13.5). An element belongs to one block, so two calls give the same bits.
    """
    tiles_v, tiles_c = ct.num_tiles(d, 1, (BLOCK_N, BLOCK_V)), ct.num_tiles(x, 1, (BLOCK_N, BLOCK_C))
    v, c = place(ct.bid(0), tiles_v, tiles_c, GROUP)
    end = ct.num_tiles(d, 0, (BLOCK_N, BLOCK_V))
    total = product_of_columns(d, x, 0, end, v, c, BLOCK_N, BLOCK_V, BLOCK_C)
    if ADD:
        dweight.tiled_view((BLOCK_V, BLOCK_C)).atomic_store_add((v, c), total)
    else:
        ct.store(dweight, (v, c), total)
