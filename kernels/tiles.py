"""The order in which the programs of a kernel take the tiles of a matrix."""

import triton
import triton.language as tl


@triton.jit
def place(tile, tiles_n, tiles_c, GROUP: tl.constexpr):
    """Return the row and the column of a tile, both counted in tiles.

    The order goes GROUP tiles down before one tile to the right, so that the programs that run at the same time share
    operands in the L2, and access long pieces of rows and of columns.
    """
    band, within = tile // (GROUP * tiles_c), tile % (GROUP * tiles_c)
    height = min(tiles_n - band * GROUP, GROUP)
    return band * GROUP + within % height, within // height
