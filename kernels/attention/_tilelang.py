"""The kernels of tilelang.py. Importing this file imports TileLang, which reads the source of these functions.

q, k, v, out and their gradients are (B, T, H, D), and lse and delta (B, H, Tq rounded up) fp32. `window` is Tk without
a window, and `group` the number of query heads that share a key head. A tile has M queries or N keys, and all D
channels of a head. What lies beyond the edge of a tensor is loaded as 0, and not stored.
"""

import math

import tilelang
import tilelang.language as T

LOG2E = math.log2(math.e)  # exp(x) = exp2(LOG2E x); the hardware has only exp2
LOWEST = -1e30  # below every score, but finite, because -inf - -inf would be NaN
FAST = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}  # or exp2 would be four instructions, for subnormal results
ROWS = T.GemmWarpPolicy.FullRow  # a warpgroup has 64 rows of a product


def sizes() -> list[T.Var]:
    """Return B, Tq, Tk, H, Hkv, and the length of a row of lse. A kernel is compiled once for all of them."""
    return [T.dynamic(name) for name in ("B", "Tq", "Tk", "H", "Hkv", "row")]


def strides(tensor: str) -> tuple[T.Var | int, ...]:
    """Return the strides of a (B, T, H, D) tensor. Only the last one is a constant."""
    return *(T.dynamic(f"{tensor}_{axis}", "int64") for axis in "bth"), 1


def visible_keys(m: int, M: int, Tq: int, Tk: int, window: int, causal: bool) -> tuple[int, int, int, int]:
    """Return any_start, all_start, all_end, any_end of the M queries m, m + 1, ...

    No query sees a key before any_start or from any_end on. All see the keys from all_start to before all_end.
    """
    if not causal:
        return 0, 0, Tk, Tk
    all_end, any_end = m + Tk - Tq + 1, T.min(m + M, Tq) + Tk - Tq
    return T.max(all_end - window, 0), any_end - window, all_end, any_end


@tilelang.jit(pass_configs=FAST)
def attention_fwd(D, group, tile, causal, dtype):
    (B, Tq, Tk, H, Hkv, row), M, N = sizes(), tile.queries, tile.keys

    @T.prim_func
    def tilelang_attention_fwd(
        q: T.StridedTensor((B, Tq, H, D), strides("q"), dtype),
        k: T.StridedTensor((B, Tk, Hkv, D), strides("k"), dtype),
        v: T.StridedTensor((B, Tk, Hkv, D), strides("v"), dtype),
        out: T.Tensor((B, Tq, H, D), dtype),
        lse: T.Tensor((B, H, row), "float32"),
        scale: T.float32,
        window: T.int32,
    ):
        with T.Kernel(T.ceildiv(Tq, M), H, B, threads=tile.threads) as (block, h, b):
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(tile.registers)
            q_shared = T.alloc_shared((M, D), dtype)
            k_shared = T.alloc_shared((N, D), dtype)
            v_shared = T.alloc_shared((N, D), dtype)
            out_shared = T.alloc_shared((M, D), dtype)
            s = T.alloc_fragment((M, N), "float32")
            p = T.alloc_fragment((M, N), dtype)
            total = T.alloc_fragment((M, D), "float32")
            largest = T.alloc_fragment((M,), "float32")  # m of triton.py, times log2(e)
            before = T.alloc_fragment((M,), "float32")
            shrink = T.alloc_fragment((M,), "float32")
            added = T.alloc_fragment((M,), "float32")
            sums = T.alloc_fragment((M,), "float32")  # l of triton.py
            m = (T.ceildiv(Tq, M) - 1 - block) * M  # a head's block with the most keys starts first
            any_start, all_start, all_end, any_end = visible_keys(m, M, Tq, Tk, window, causal)
            T.copy(q[b, m : m + M, h, 0:D], q_shared)
            T.fill(largest, LOWEST)
            T.clear(sums)
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(any_end, N) - any_start // N, num_stages=tile.stages):
                n = (any_start // N + step) * N
                T.copy(k[b, n : n + N, h // group, 0:D], k_shared)
                T.copy(v[b, n : n + N, h // group, 0:D], v_shared)
                T.gemm(q_shared, k_shared, s, transpose_B=True, policy=ROWS, clear_accum=True)
                if n < all_start or n + N > all_end:
                    for i, j in T.Parallel(M, N):
                        # At most Tk: rows beyond the last query see a key, too, and are not NaN
                        back = T.min(m + i + Tk - Tq + 1, Tk) - (n + j) if causal else Tk - (n + j)
                        s[i, j] = T.if_then_else(T.And(back > 0, back <= window), s[i, j], -T.infinity("float32"))
                T.copy(largest, before)
                T.reduce_max(s, largest, dim=1)
                for i in T.Parallel(M):
                    largest[i] = T.max(before[i], largest[i] * (scale * LOG2E))
                    shrink[i] = T.exp2(before[i] - largest[i])
                for i, j in T.Parallel(M, N):
                    s[i, j] = T.exp2(s[i, j] * (scale * LOG2E) - largest[i])
                T.reduce_sum(s, added, dim=1)
                for i in T.Parallel(M):
                    sums[i] = sums[i] * shrink[i] + added[i]
                for i, d in T.Parallel(M, D):
                    total[i, d] *= shrink[i]
                T.copy(s, p)
                T.gemm(p, v_shared, total, policy=ROWS)
            for i, d in T.Parallel(M, D):
                total[i, d] /= sums[i]
            T.copy(total, out_shared)
            T.copy(out_shared, out[b, m : m + M, h, 0:D])
            for i in T.Parallel(M):
                lse[b, h, m + i] = largest[i] + T.log2(sums[i])

    return tilelang_attention_fwd


@tilelang.jit(pass_configs=FAST)
def attention_dq(D, group, tile, causal, dtype):
    """Write dq, and delta, each query's sum of dout * out."""
    (B, Tq, Tk, H, Hkv, row), M, N = sizes(), tile.queries, tile.keys

    @T.prim_func
    def tilelang_attention_dq(
        q: T.StridedTensor((B, Tq, H, D), strides("q"), dtype),
        k: T.StridedTensor((B, Tk, Hkv, D), strides("k"), dtype),
        v: T.StridedTensor((B, Tk, Hkv, D), strides("v"), dtype),
        out: T.Tensor((B, Tq, H, D), dtype),
        dout: T.Tensor((B, Tq, H, D), dtype),
        lse: T.Tensor((B, H, row), "float32"),
        delta: T.Tensor((B, H, row), "float32"),
        dq: T.StridedTensor((B, Tq, H, D), strides("dq"), dtype),
        scale: T.float32,
        window: T.int32,
    ):
        with T.Kernel(T.ceildiv(Tq, M), H, B, threads=tile.threads) as (block, h, b):
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(tile.registers)
            q_shared = T.alloc_shared((M, D), dtype)
            dout_shared = T.alloc_shared((M, D), dtype)
            k_shared = T.alloc_shared((N, D), dtype)
            v_shared = T.alloc_shared((N, D), dtype)
            dq_shared = T.alloc_shared((M, D), dtype)
            s = T.alloc_fragment((M, N), "float32")
            dp = T.alloc_fragment((M, N), "float32")
            ds = T.alloc_fragment((M, N), dtype)
            total = T.alloc_fragment((M, D), "float32")
            row_lse = T.alloc_fragment((M,), "float32")
            row_delta = T.alloc_fragment((M,), "float32")
            m = (T.ceildiv(Tq, M) - 1 - block) * M
            any_start, all_start, all_end, any_end = visible_keys(m, M, Tq, Tk, window, causal)
            T.copy(q[b, m : m + M, h, 0:D], q_shared)
            T.copy(dout[b, m : m + M, h, 0:D], dout_shared)
            for i in T.Parallel(M):
                row_lse[i] = lse[b, h, m + i]
            for i, d in T.Parallel(M, D):
                total[i, d] = T.cast(out[b, m + i, h, d], "float32") * T.cast(dout[b, m + i, h, d], "float32")
            T.reduce_sum(total, row_delta, dim=1)
            for i in T.Parallel(M):
                delta[b, h, m + i] = row_delta[i]
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(any_end, N) - any_start // N, num_stages=tile.stages):
                n = (any_start // N + step) * N
                T.copy(k[b, n : n + N, h // group, 0:D], k_shared)
                T.copy(v[b, n : n + N, h // group, 0:D], v_shared)
                T.gemm(q_shared, k_shared, s, transpose_B=True, policy=ROWS, clear_accum=True)
                T.gemm(dout_shared, v_shared, dp, transpose_B=True, policy=ROWS, clear_accum=True)
                if n < all_start or n + N > all_end:
                    for i, j in T.Parallel(M, N):
                        back = (m + i + Tk - Tq + 1 if causal else Tk) - (n + j)
                        s[i, j] = T.if_then_else(T.And(back > 0, back <= window), s[i, j], -T.infinity("float32"))
                for i, j in T.Parallel(M, N):
                    s[i, j] = T.exp2(s[i, j] * (scale * LOG2E) - row_lse[i])
                for i, j in T.Parallel(M, N):
                    ds[i, j] = T.cast(s[i, j] * (dp[i, j] - row_delta[i]), dtype)
                T.gemm(ds, k_shared, total, policy=ROWS)
            for i, d in T.Parallel(M, D):
                total[i, d] *= scale
            T.copy(total, dq_shared)
            T.copy(dq_shared, dq[b, m : m + M, h, 0:D])

    return tilelang_attention_dq


@tilelang.jit(pass_configs=FAST)
def attention_dkdv(D, group, tile, causal, dtype):
    """Write dk and dv. s, p and ds have a row for each key: p and ds are first factors, and stay in registers."""
    (B, Tq, Tk, H, Hkv, row), M, N = sizes(), tile.queries, tile.keys

    @T.prim_func
    def tilelang_attention_dkdv(
        q: T.StridedTensor((B, Tq, H, D), strides("q"), dtype),
        k: T.StridedTensor((B, Tk, Hkv, D), strides("k"), dtype),
        v: T.StridedTensor((B, Tk, Hkv, D), strides("v"), dtype),
        dout: T.Tensor((B, Tq, H, D), dtype),
        lse: T.Tensor((B, H, row), "float32"),
        delta: T.Tensor((B, H, row), "float32"),
        dk: T.StridedTensor((B, Tk, Hkv, D), strides("dk"), dtype),
        dv: T.StridedTensor((B, Tk, Hkv, D), strides("dv"), dtype),
        scale: T.float32,
        window: T.int32,
    ):
        with T.Kernel(T.ceildiv(Tk, N), Hkv, B, threads=tile.threads) as (block, kv_head, b):
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(tile.registers)
            k_shared = T.alloc_shared((N, D), dtype)
            v_shared = T.alloc_shared((N, D), dtype)
            q_shared = T.alloc_shared((M, D), dtype)
            dout_shared = T.alloc_shared((M, D), dtype)
            lse_shared = T.alloc_shared((M,), "float32")
            delta_shared = T.alloc_shared((M,), "float32")
            dk_shared = T.alloc_shared((N, D), dtype)
            dv_shared = T.alloc_shared((N, D), dtype)
            s = T.alloc_fragment((N, M), "float32")
            dp = T.alloc_fragment((N, M), "float32")
            p = T.alloc_fragment((N, M), dtype)
            ds = T.alloc_fragment((N, M), dtype)
            total_k = T.alloc_fragment((N, D), "float32")
            total_v = T.alloc_fragment((N, D), "float32")
            n = block * N
            # No query before any_start or from any_end on sees a key of the tile. The queries from all_start to
            # before all_end see all of them. Without a causal mask no tile is masked, because dk and dv of keys beyond
            # Tk are not stored
            first = n + Tq - Tk  # the first query that sees key n
            any_start, all_start, all_end, any_end = (
                T.max(first, 0) if causal else 0,
                first + N - 1 if causal else 0,
                first + window if causal else Tq + M,
                T.min(first + N - 1 + window, Tq) if causal else Tq,
            )
            # Tiles of queries of each head. At least one, even if it is masked: the loop waits for k_shared, and
            # dk_shared takes its place
            steps = T.max(T.ceildiv(any_end, M) - any_start // M, 1)
            T.copy(k[b, n : n + N, kv_head, 0:D], k_shared)
            T.copy(v[b, n : n + N, kv_head, 0:D], v_shared)
            T.clear(total_k)
            T.clear(total_v)
            for step in T.Pipelined(group * steps, num_stages=tile.stages):
                h = kv_head * group + (step // steps if group > 1 else 0)
                m = (any_start // M + (step % steps if group > 1 else step)) * M
                T.copy(q[b, m : m + M, h, 0:D], q_shared)
                T.copy(dout[b, m : m + M, h, 0:D], dout_shared)
                T.copy(lse[b, h, m : m + M], lse_shared)
                T.copy(delta[b, h, m : m + M], delta_shared)
                T.gemm(k_shared, q_shared, s, transpose_B=True, policy=ROWS, clear_accum=True)
                if causal and (m < all_start or m + M > all_end):
                    for j, i in T.Parallel(N, M):
                        back = m + i + Tk - Tq + 1 - (n + j)
                        s[j, i] = T.if_then_else(T.And(back > 0, back <= window), s[j, i], -T.infinity("float32"))
                for j, i in T.Parallel(N, M):
                    s[j, i] = T.exp2(s[j, i] * (scale * LOG2E) - lse_shared[i])
                T.copy(s, p)
                T.gemm(p, dout_shared, total_v, policy=ROWS)
                T.gemm(v_shared, dout_shared, dp, transpose_B=True, policy=ROWS, clear_accum=True)
                for j, i in T.Parallel(N, M):
                    ds[j, i] = T.cast(s[j, i] * (dp[j, i] - delta_shared[i]), dtype)
                T.gemm(ds, q_shared, total_k, policy=ROWS)
            for j, d in T.Parallel(N, D):
                total_k[j, d] *= scale
            T.copy(total_k, dk_shared)
            T.copy(total_v, dv_shared)
            T.copy(dk_shared, dk[b, n : n + N, kv_head, 0:D])
            T.copy(dv_shared, dv[b, n : n + N, kv_head, 0:D])

    return tilelang_attention_dkdv
