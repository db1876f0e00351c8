"""The kernels of tilelang.py. Importing this file imports TileLang, which reads the source of these functions."""

import tilelang
import tilelang.language as T


@tilelang.jit
def matmul(C, F, tile, w_by_rows, has_bias, dtype):
    """Compute y = x W^T + bias for x (N, C) and W (F, C), or y = x W + bias for W (C, F), in tiles Tile."""
    N = T.dynamic("N")
    ROWS, COLUMNS, CHANNELS = tile.rows, tile.columns, tile.depth
    w_shape = (F, C) if w_by_rows else (C, F)
    w_tile = (COLUMNS, CHANNELS) if w_by_rows else (CHANNELS, COLUMNS)
    tiles = -(-F // COLUMNS)  # of a row

    @T.prim_func
    def tilelang_matmul(
        x: T.Tensor((N, C), dtype),
        w: T.Tensor(w_shape, dtype),
        bias: T.Tensor((F,), dtype),
        y: T.Tensor((N, F), dtype),
    ):
        with T.Kernel(T.ceildiv(N, ROWS) * tiles, threads=tile.threads) as program:
            T.annotate_min_blocks_per_sm(tile.programs)
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(tile.registers)
            x_shared = T.alloc_shared((ROWS, CHANNELS), dtype)
            w_shared = T.alloc_shared(w_tile, dtype)
            y_shared = T.alloc_shared((ROWS, COLUMNS), dtype)
            total = T.alloc_fragment((ROWS, COLUMNS), "float32")
            n = program // tiles * ROWS
            f = program % tiles * COLUMNS
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(C, CHANNELS), num_stages=tile.stages):
                T.copy(x[n, step * CHANNELS], x_shared)
                if w_by_rows:
                    T.copy(w[f, step * CHANNELS], w_shared)
                else:
                    T.copy(w[step * CHANNELS, f], w_shared)
                T.gemm(x_shared, w_shared, total, transpose_B=w_by_rows)
            if has_bias:
                for r, c in T.Parallel(ROWS, COLUMNS):
                    total[r, c] += T.cast(bias[f + c], "float32")
            T.copy(total, y_shared)
            T.copy(y_shared, y[n, f])

    return tilelang_matmul


@tilelang.jit
def split_matmul(F, C, tile, dtype, out_dtype):
    """Compute out[split] = a^T b over a part of the rows of a (N, F) and b (N, C). A part has steps * ROWS rows."""
    N, splits = T.dynamic("N"), T.dynamic("splits")
    BLOCK_F, BLOCK_C, ROWS = tile.rows, tile.columns, tile.depth
    tiles_c = -(-C // BLOCK_C)
    tiles = -(-F // BLOCK_F) * tiles_c

    @T.prim_func
    def tilelang_split_matmul(
        a: T.Tensor((N, F), dtype),
        b: T.Tensor((N, C), dtype),
        out: T.Tensor((splits, F, C), out_dtype),
        steps: T.int32,
    ):
        with T.Kernel(tiles, splits, threads=tile.threads) as (program, split):
            T.annotate_min_blocks_per_sm(tile.programs)
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(tile.registers)
            a_shared = T.alloc_shared((ROWS, BLOCK_F), dtype)
            b_shared = T.alloc_shared((ROWS, BLOCK_C), dtype)
            total = T.alloc_fragment((BLOCK_F, BLOCK_C), "float32")
            f = program // tiles_c * BLOCK_F
            c = program % tiles_c * BLOCK_C
            T.clear(total)
            for step in T.Pipelined(steps, num_stages=tile.stages):
                T.copy(a[(split * steps + step) * ROWS, f], a_shared)
                T.copy(b[(split * steps + step) * ROWS, c], b_shared)
                T.gemm(a_shared, b_shared, total, transpose_A=True, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(BLOCK_F, BLOCK_C):
                out[split, f + i, c + j] = T.cast(total[i, j], out_dtype)

    return tilelang_split_matmul
