"""The kernel of sum_rows() and add_partial_sums() in tilelang.py. Importing this file imports TileLang."""

import tilelang
import tilelang.language as T

LANES = 8  # threads for a row
GROUPS = 32  # rows that the threads of a program read at once
STEPS = 4  # such groups in an iteration, so that four loads are in flight


@tilelang.jit
def sum_rows(C, vec, dtype, out_dtype):
    """Sum the rows of x (N, C) into out (P, C). Row n belongs to program n // ROWS % P."""
    N, P = T.dynamic("N"), T.dynamic("P")
    COLUMNS, ROWS = LANES * vec, STEPS * GROUPS
    layout = T.Fragment(
        (ROWS, COLUMNS), forward_fn=lambda r, c: (r % GROUPS * LANES + c // vec, r // GROUPS * vec + c % vec)
    )

    @T.prim_func
    def tilelang_sum_rows(x: T.Tensor((N, C), dtype), out: T.Tensor((P, C), out_dtype)):
        with T.Kernel(T.ceildiv(C, COLUMNS), P, threads=LANES * GROUPS) as (tile, program):
            total = T.alloc_fragment((ROWS, COLUMNS), "float32")
            column = T.alloc_fragment((COLUMNS,), "float32")
            T.annotate_layout({total: layout})
            T.clear(total)
            for step in T.serial(T.ceildiv(N - program * ROWS, P * ROWS)):
                first = (step * P + program) * ROWS
                for r, c in T.Parallel(ROWS, COLUMNS):
                    total[r, c] += T.cast(x[first + r, tile * COLUMNS + c], "float32")
            T.reduce_sum(total, column, dim=0, batch=vec)
            for c in T.Parallel(COLUMNS):
                out[program, tile * COLUMNS + c] = T.cast(column[c], out_dtype)

    return tilelang_sum_rows
