"""The kernels of tilelang.py. Importing this file imports TileLang, which reads the source of these functions."""

import tilelang
import tilelang.language as T


def row_layout(rows: int, C: int, vec: int, lanes: int) -> tuple[int, T.Fragment]:
    """Return the width W >= C of a tile of rows, and which thread holds which number of the tile (rows, W).

    `lanes` threads hold a row. A thread takes `vec` adjacent numbers at a time, so a warp loads adjacent vectors.
    Without this layout TileLang would give a thread a whole row, so that it can sum the row alone.
    """
    step = vec * lanes
    W = -(-C // step) * step
    layout = T.Fragment((rows, W), forward_fn=lambda r, c: (r * lanes + c // vec % lanes, c // step * vec + c % vec))
    return W, layout


@tilelang.jit
def norm_fwd(C, launch, has_residual, has_bias, centred, x_dtype, stream_dtype, dtype):
    """Write y, the new stream (if there is a residual), mean (if `centred`) and rstd for x and residual (N, C)."""
    N = T.dynamic("N")
    vec, lanes, rows = launch.vec, launch.lanes, launch.rows
    W, layout = row_layout(rows, C, vec, lanes)

    @T.prim_func
    def tilelang_norm_fwd(
        x: T.Tensor((N, C), x_dtype),
        residual: T.Tensor((N, C), stream_dtype),
        weight: T.Tensor((C,), dtype),
        bias: T.Tensor((C,), dtype),
        y: T.Tensor((N, C), dtype),
        stream: T.Tensor((N, C), stream_dtype),
        mean: T.Tensor((N,), "float32"),
        rstd: T.Tensor((N,), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(N, rows), threads=rows * lanes) as program:
            h = T.alloc_fragment((rows, W), "float32")
            square = T.alloc_fragment((rows, W), "float32")
            row_mean = T.alloc_fragment((rows,), "float32")
            row_rstd = T.alloc_fragment((rows,), "float32")
            rounded = T.alloc_fragment((rows, W), stream_dtype)
            out = T.alloc_fragment((rows, W), dtype)
            T.annotate_layout(dict.fromkeys((h, square, rounded, out), layout))
            first = program * rows
            for r, c in T.Parallel(rows, W):
                h[r, c] = T.cast(x[first + r, c], "float32")
            if has_residual:
                for r, c in T.Parallel(rows, W):
                    h[r, c] += T.cast(residual[first + r, c], "float32")
                # normalise the rounded sum, because the backward starts from the rounded sum
                for r, c in T.Parallel(rows, W):
                    rounded[r, c] = T.cast(h[r, c], stream_dtype)
                for r, c in T.Parallel(rows, W):
                    h[r, c] = T.cast(rounded[r, c], "float32")
                for r, c in T.Parallel(rows, W):
                    stream[first + r, c] = rounded[r, c]
            if centred:
                T.reduce_sum(h, row_mean, dim=1)
                for r in T.Parallel(rows):
                    row_mean[r] = row_mean[r] / C
                    mean[first + r] = row_mean[r]
                for r, c in T.Parallel(rows, W):
                    h[r, c] = T.if_then_else(c < C, h[r, c] - row_mean[r], 0.0)
            for r, c in T.Parallel(rows, W):
                square[r, c] = h[r, c] * h[r, c]
            T.reduce_sum(square, row_rstd, dim=1)
            for r in T.Parallel(rows):
                row_rstd[r] = 1.0 / T.sqrt(row_rstd[r] / C + eps)
                rstd[first + r] = row_rstd[r]
            for r, c in T.Parallel(rows, W):
                h[r, c] = h[r, c] * row_rstd[r] * T.cast(weight[c], "float32")
            if has_bias:
                for r, c in T.Parallel(rows, W):
                    h[r, c] += T.cast(bias[c], "float32")
            for r, c in T.Parallel(rows, W):
                out[r, c] = T.cast(h[r, c], dtype)
            for r, c in T.Parallel(rows, W):
                y[first + r, c] = out[r, c]

    return tilelang_norm_fwd


@tilelang.jit
def norm_bwd(C, launch, has_dstream, has_bias, has_dresidual, centred, x_dtype, stream_dtype, dtype):
    """Write dx, dresidual (if it differs from dx in dtype), and the sums (P, C) of each program's rows."""
    N, P = T.dynamic("N"), T.dynamic("P")
    vec, lanes, rows = launch.vec, launch.lanes, launch.rows
    W, layout = row_layout(rows, C, vec, lanes)
    held = W // lanes  # numbers of a row that a thread holds
    # every row of threads has all columns. With vec = 1 TileLang finds no layout for them by itself
    column_layout = T.Fragment(
        (W,),
        forward_fn=lambda c, row=0: (row * lanes + c // vec % lanes, c // (vec * lanes) * vec + c % vec),
        replicate=rows,
    )

    @T.prim_func
    def tilelang_norm_bwd(
        dy: T.Tensor((N, C), dtype),
        dstream: T.Tensor((N, C), stream_dtype),
        stream: T.Tensor((N, C), stream_dtype),
        weight: T.Tensor((C,), dtype),
        mean: T.Tensor((N,), "float32"),
        rstd: T.Tensor((N,), "float32"),
        dx: T.Tensor((N, C), x_dtype),
        dresidual: T.Tensor((N, C), stream_dtype),
        dweight: T.Tensor((P, C), "float32"),
        dbias: T.Tensor((P, C), "float32"),
    ):
        with T.Kernel(P, threads=rows * lanes) as program:
            T.annotate_min_blocks_per_sm(launch.programs)
            g = T.alloc_fragment((rows, W), "float32")  # dy, then dy weight, then the gradient
            xhat = T.alloc_fragment((rows, W), "float32")
            added = T.alloc_fragment((rows, W), stream_dtype)  # dstream, and then dresidual
            rounded = T.alloc_fragment((rows, W), x_dtype)
            product = T.alloc_fragment((rows, W), "float32")
            dweight_sum = T.alloc_fragment((rows, W), "float32")
            dbias_sum = T.alloc_fragment((rows, W), "float32")
            row_mean = T.alloc_fragment((rows,), "float32")
            row_rstd = T.alloc_fragment((rows,), "float32")
            mean_g = T.alloc_fragment((rows,), "float32")
            mean_gx = T.alloc_fragment((rows,), "float32")
            columns = T.alloc_fragment((W,), "float32")
            T.annotate_layout(dict.fromkeys((g, xhat, added, rounded, product, dweight_sum, dbias_sum), layout))
            T.clear(dweight_sum)
            T.clear(dbias_sum)
            for step in T.serial(T.ceildiv(N - program * rows, P * rows)):
                first = (step * P + program) * rows
                # loads beyond the last row or column return 0, so these elements add 0 to every sum
                for r, c in T.Parallel(rows, W):
                    g[r, c] = T.cast(dy[first + r, c], "float32")
                for r, c in T.Parallel(rows, W):
                    xhat[r, c] = T.cast(stream[first + r, c], "float32")
                if has_dstream:
                    for r, c in T.Parallel(rows, W):
                        added[r, c] = dstream[first + r, c]
                for r in T.Parallel(rows):
                    row_rstd[r] = rstd[first + r]
                if centred:
                    for r in T.Parallel(rows):
                        row_mean[r] = mean[first + r]
                    for r, c in T.Parallel(rows, W):
                        xhat[r, c] -= row_mean[r]
                for r, c in T.Parallel(rows, W):
                    xhat[r, c] *= row_rstd[r]
                    dweight_sum[r, c] += g[r, c] * xhat[r, c]
                if has_bias:
                    for r, c in T.Parallel(rows, W):
                        dbias_sum[r, c] += g[r, c]
                for r, c in T.Parallel(rows, W):
                    g[r, c] *= T.cast(weight[c], "float32")
                    product[r, c] = g[r, c] * xhat[r, c]
                T.reduce_sum(product, mean_gx, dim=1)
                for r in T.Parallel(rows):
                    mean_gx[r] = mean_gx[r] / C
                if centred:
                    T.reduce_sum(g, mean_g, dim=1)
                    for r in T.Parallel(rows):
                        mean_g[r] = mean_g[r] / C
                    for r, c in T.Parallel(rows, W):
                        g[r, c] -= mean_g[r]
                for r, c in T.Parallel(rows, W):
                    g[r, c] = row_rstd[r] * (g[r, c] - xhat[r, c] * mean_gx[r])
                if has_dstream:
                    for r, c in T.Parallel(rows, W):
                        g[r, c] += T.cast(added[r, c], "float32")
                for r, c in T.Parallel(rows, W):
                    rounded[r, c] = T.cast(g[r, c], x_dtype)
                for r, c in T.Parallel(rows, W):
                    dx[first + r, c] = rounded[r, c]
                if has_dresidual:
                    for r, c in T.Parallel(rows, W):
                        added[r, c] = T.cast(g[r, c], stream_dtype)
                    for r, c in T.Parallel(rows, W):
                        dresidual[first + r, c] = added[r, c]
            T.reduce_sum(dweight_sum, columns, dim=0, batch=held)
            for c in T.Parallel(W, loop_layout=column_layout):
                dweight[program, c] = columns[c]
            if has_bias:
                T.reduce_sum(dbias_sum, columns, dim=0, batch=held)
                for c in T.Parallel(W, loop_layout=column_layout):
                    dbias[program, c] = columns[c]

    return tilelang_norm_bwd
