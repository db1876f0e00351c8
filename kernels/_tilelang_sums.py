"""The kernel of sum_rows() and add_partial_sums() in tilelang.py. Importing this file imports TileLang."""

import tilelang
import tilelang.language as T


@tilelang.jit
def sum_rows(C, tile, dtype, out_dtype):
    """Sum the rows of x (N, C) into out (P, C), in tiles SumTile. Row n belongs to program n // ROWS % P."""
    N, P = T.dynamic("N"), T.dynamic("P")
    vec, lanes, ROWS, COLUMNS = tile.vec, tile.lanes, tile.rows, tile.columns
    groups = tile.threads // lanes  # rows that the threads of a program load at once
    layout = T.Fragment(
        (ROWS, COLUMNS), forward_fn=lambda r, c: (r % groups * lanes + c // vec, r // groups * vec + c % vec)
    )

    @T.prim_func
    def tilelang_sum_rows(x: T.Tensor((N, C), dtype), out: T.Tensor((P, C), out_dtype)):
        with T.Kernel(T.ceildiv(C, COLUMNS), P, threads=tile.threads) as (column_tile, program):
            total = T.alloc_fragment((ROWS, COLUMNS), "float32")
            column = T.alloc_fragment((COLUMNS,), "float32")
            T.annotate_layout({total: layout})
            T.clear(total)
            for step in T.serial(T.ceildiv(N - program * ROWS, P * ROWS)):
                first = (step * P + program) * ROWS
                for r, c in T.Parallel(ROWS, COLUMNS):
                    total[r, c] += T.cast(x[first + r, column_tile * COLUMNS + c], "float32")
            T.reduce_sum(total, column, dim=0, batch=vec)
            for c in T.Parallel(COLUMNS):
                out[program, column_tile * COLUMNS + c] = T.cast(column[c], out_dtype)

    return tilelang_sum_rows
