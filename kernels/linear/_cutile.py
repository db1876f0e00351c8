"""The matmuls of cutile.py. Importing this file imports cuda.tile, which reads the source of these functions."""

import cuda.tile as ct

ZERO = ct.PaddingMode.ZERO
Flag, Size = ct.Constant[bool], ct.Constant[int]


def place(tile: int, tiles_n: int, tiles_f: int, GROUP: int) -> tuple[int, int]:
    """Return the row and the column of a tile: GROUP tiles down before one to the right (kernels/tiles.py)."""
    band, within = tile // (GROUP * tiles_f), tile % (GROUP * tiles_f)
    height = min(tiles_n - band * GROUP, GROUP)
    return band * GROUP + within % height, within // height


def product(
    x: ct.Array, w: ct.Array, n: int, f: int, BLOCK_N: int, BLOCK_F: int, BLOCK_C: int, W_BY_ROWS: bool
) -> ct.Tile:
    """Return tile (n, f) of x w^T, or of x w, in fp32."""
    total = ct.zeros((BLOCK_N, BLOCK_F), dtype=ct.float32)
    for c in range(ct.num_tiles(x, 1, (BLOCK_N, BLOCK_C))):
        x_tile = ct.load(x, (n, c), (BLOCK_N, BLOCK_C), padding_mode=ZERO)
        if W_BY_ROWS:
            w_tile = ct.load(w, (c, f), (BLOCK_C, BLOCK_F), order="F", padding_mode=ZERO)
        else:
            w_tile = ct.load(w, (c, f), (BLOCK_C, BLOCK_F), padding_mode=ZERO)
        total = ct.mma(x_tile, w_tile, total)
    return total


def product_of_columns(
    a: ct.Array, b: ct.Array, start: int, end: int, f: int, c: int, BLOCK_N: int, BLOCK_F: int, BLOCK_C: int
) -> ct.Tile:
    """Return tile (f, c) of a^T b in fp32, summed over the tiles of rows from `start` to before `end`."""
    total = ct.zeros((BLOCK_F, BLOCK_C), dtype=ct.float32)
    for n in range(start, end):
        a_tile = ct.load(a, (f, n), (BLOCK_F, BLOCK_N), order="F", padding_mode=ZERO)
        b_tile = ct.load(b, (n, c), (BLOCK_N, BLOCK_C), padding_mode=ZERO)
        total = ct.mma(a_tile, b_tile, total)
    return total


# Eight warps multiply, so a thread has 128 of the sums of a tile of 128 x 256. By default four do, and they spill
@ct.kernel(num_worker_warps=8)
def cutile_matmul(
    x,  # (N, C)
    w,  # (F, C) if W_BY_ROWS, and otherwise (C, F)
    bias,  # (F,), read only with HAS_BIAS
    y,  # (N, F)
    BLOCK_N: Size,
    BLOCK_F: Size,
    BLOCK_C: Size,
    GROUP: Size,
    W_BY_ROWS: Flag,
    HAS_BIAS: Flag,
):
    """Write y = x w^T + bias, or x w + bias. A block takes a tile of y after another."""
    tiles_n, tiles_f = ct.num_tiles(y, 0, (BLOCK_N, BLOCK_F)), ct.num_tiles(y, 1, (BLOCK_N, BLOCK_F))
    for tile in range(ct.bid(0), tiles_n * tiles_f, ct.num_blocks(0)):
        n, f = place(tile, tiles_n, tiles_f, GROUP)
        total = product(x, w, n, f, BLOCK_N, BLOCK_F, BLOCK_C, W_BY_ROWS)
        if HAS_BIAS:
            total += ct.load(bias, (f,), (BLOCK_F,), padding_mode=ZERO).astype(ct.float32).reshape((1, BLOCK_F))
        ct.store(y, (n, f), total.astype(y.dtype))


@ct.kernel(num_worker_warps=8)
def cutile_matmul_transposed(
    a,  # (N, F)
    b,  # (N, C)
    out,  # (splits, F, C)
    steps: int,  # tiles of rows in a part of the sum
    BLOCK_N: Size,  # rows that are added at once
    BLOCK_F: Size,
    BLOCK_C: Size,
    GROUP: Size,
):
    """Write out[split] = a^T b over the rows of this part of the sum."""
    tiles_f, tiles_c = ct.num_tiles(a, 1, (BLOCK_N, BLOCK_F)), ct.num_tiles(b, 1, (BLOCK_N, BLOCK_C))
    f, c = place(ct.bid(0), tiles_f, tiles_c, GROUP)
    split = ct.bid(1)
    start, end = split * steps, min(split * steps + steps, ct.num_tiles(a, 0, (BLOCK_N, BLOCK_F)))
    total = product_of_columns(a, b, start, end, f, c, BLOCK_N, BLOCK_F, BLOCK_C)
    ct.store(out, (split, f, c), total.astype(out.dtype).reshape((1, BLOCK_F, BLOCK_C)))
