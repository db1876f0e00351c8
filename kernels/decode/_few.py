"""The products of a step of few rows. Each kernel loads its rows of W, waits for its predecessor, and multiplies.

triton.py says why, and what they measure. The arguments of the kernels:

    x_ptr                       (N, K): the operand, or the output of the branch that is added to the stream
    residual_ptr                (N, K): the stream before that branch
    stream_ptr                  (N, K): the new stream
    ln_weight_ptr, ln_bias_ptr  (K,), and (K,) or None
    weight_ptr                  (OUT, K)
    scale_ptr                   (OUT,) fp32 if W is in int8, otherwise None
    bias_ptr                    (OUT,) or None
    out_ptr                     (N, OUT); for qkv the queries, (N, H D); for swiglu (N, OUT / 2)
    k_ptr, v_ptr                (B, cache_rows, Hkv, D). Without k_ptr, out_ptr gets queries and keys: see store_qkv()
    rope_ptr                    (2, N, D/2) fp32, or None without rotary positions
    positions_ptr               (B,) int64: of token 0 of each sequence
    wte_ptr, wpe_ptr            (V, K), and (wpe_rows, K) or None with rotary positions
    tokens_ptr                  (N,) int64: row b T + t is token t of sequence b
    count_ptr                   (COUNTS,) int32 or None: see zero_counts()
    Q_WIDTH, KV_WIDTH           H D and Hkv D
    EPS, CENTRED                of the norm: CENTRED is False for RMSNorm
    ACTIVATION                  gelu, relu2, or swiglu, whose W has the rows of the gate and then those of up
    ROWS                        N or more
    BLOCK_N                     rows of W of a program
    BLOCK_K, SLICES             columns of a tile of W, and the parts of them that are summed separately
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode._pairs import weight_rows
from kernels.decode._qkv import rows_in_cache, store_qkv
from kernels.decode._step import FEW, NOT_SPECIALISED, Matrix, Step, split_scales
from kernels.decode._tiles import (
    add_bias,
    add_branch,
    embed,
    launch_next_kernel,
    load_vector,
    load_weights,
    multiply,
    multiply_rows,
    normalise,
    store_hidden,
    store_rows,
    wait_for_earlier_kernels,
    zero_counts,
)
from kernels.gpu import multiprocessors


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _product_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    OUT: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = x W^T + bias: proj, fc_proj and the head."""
    launch_next_kernel(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.arange(0, ROWS).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weights, _, _ = load_weights(weight_ptr, None, None, n, OUT, K, BLOCK_K, SLICES, dtype)
    scale, bias = load_vector(scale_ptr, n, OUT, 1.0), load_vector(bias_ptr, n, OUT, 0.0)
    wait_for_earlier_kernels(PDL)
    y = add_bias(multiply_rows(x_ptr, row, weights, N, K, BLOCK_K, PRECISION), scale, bias, dtype)
    store_rows(out_ptr, y, row, n, N, OUT)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _fc_kernel(
    x_ptr,
    residual_ptr,
    stream_ptr,
    ln_weight_ptr,
    ln_bias_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    OUT: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """stream = residual + x; out = activation(norm(stream) W^T + bias)."""
    launch_next_kernel(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.arange(0, ROWS).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if ACTIVATION == "swiglu":
        n = weight_rows(tl.program_id(0), BLOCK_N, OUT, True)
    weights, gains, shifts = load_weights(weight_ptr, ln_weight_ptr, ln_bias_ptr, n, OUT, K, BLOCK_K, SLICES, dtype)
    scale, bias = load_vector(scale_ptr, n, OUT, 1.0), load_vector(bias_ptr, n, OUT, 0.0)
    wait_for_earlier_kernels(PDL)
    stream = add_branch(x_ptr, residual_ptr, stream_ptr, row[:, None], tl.program_id(0) == 0, N, K, BLOCK_K)
    x = normalise(stream, gains, shifts, K, BLOCK_K, EPS, CENTRED, dtype)
    y = add_bias(multiply(x, weights, PRECISION), scale, bias, dtype)
    store_hidden(out_ptr, y, row, n, N, OUT, ACTIVATION)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _qkv_kernel(
    x_ptr,
    residual_ptr,
    stream_ptr,
    ln_weight_ptr,
    ln_bias_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    rope_ptr,
    positions_ptr,
    N,
    T,
    cache_rows,
    OUT: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """stream = residual + x; q, k, v = norm(stream) W^T + bias. k and v go into the cache."""
    launch_next_kernel(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.arange(0, ROWS).to(tl.int64)
    n = weight_rows(tl.program_id(0), BLOCK_N, D, rope_ptr is not None)
    weights, gains, shifts = load_weights(weight_ptr, ln_weight_ptr, ln_bias_ptr, n, OUT, K, BLOCK_K, SLICES, dtype)
    scale, bias = load_vector(scale_ptr, n, OUT, 1.0), load_vector(bias_ptr, n, OUT, 0.0)
    cache_row = rows_in_cache(row, positions_ptr, N, T, cache_rows)
    wait_for_earlier_kernels(PDL)
    stream = add_branch(x_ptr, residual_ptr, stream_ptr, row[:, None], tl.program_id(0) == 0, N, K, BLOCK_K)
    x = normalise(stream, gains, shifts, K, BLOCK_K, EPS, CENTRED, dtype)
    y = add_bias(multiply(x, weights, PRECISION), scale, bias, dtype)
    store_qkv(y, row, n, cache_row, out_ptr, k_ptr, v_ptr, rope_ptr, N, Q_WIDTH, KV_WIDTH, D)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _embed_qkv_kernel(
    wte_ptr,
    wpe_ptr,
    tokens_ptr,
    positions_ptr,
    stream_ptr,
    ln_weight_ptr,
    ln_bias_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    rope_ptr,
    count_ptr,
    N,
    T,
    wpe_rows,
    cache_rows,
    COUNTS: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """The first kernel of a step. The stream begins with the embeddings: q, k, v = norm(stream) W^T + bias."""
    launch_next_kernel(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.arange(0, ROWS).to(tl.int64)
    n = weight_rows(tl.program_id(0), BLOCK_N, D, rope_ptr is not None)
    weights, gains, shifts = load_weights(weight_ptr, ln_weight_ptr, ln_bias_ptr, n, OUT, K, BLOCK_K, SLICES, dtype)
    scale, bias = load_vector(scale_ptr, n, OUT, 1.0), load_vector(bias_ptr, n, OUT, 0.0)
    cache_row = rows_in_cache(row, positions_ptr, N, T, cache_rows)
    wait_for_earlier_kernels(PDL)
    zero_counts(count_ptr, COUNTS)
    is_writer = tl.program_id(0) == 0
    stream = embed(
        wte_ptr, wpe_ptr, tokens_ptr, positions_ptr, stream_ptr, row[:, None], is_writer, N, T, wpe_rows, K, BLOCK_K
    )
    x = normalise(stream, gains, shifts, K, BLOCK_K, EPS, CENTRED, dtype)
    y = add_bias(multiply(x, weights, PRECISION), scale, bias, dtype)
    store_qkv(y, row, n, cache_row, out_ptr, k_ptr, v_ptr, rope_ptr, N, Q_WIDTH, KV_WIDTH, D)


def product_launch(OUT: int, K: int, dtype: torch.dtype, processors: int) -> dict:
    """Return the default launch parameters of a product for a GPU with `processors` multiprocessors.

    For a K of up to 1024 a warp takes whole rows of x, 256 columns at a time, 8 a thread. So LayerNorm needs no sum
    over warps, and K = 768 no padding: a thread holds 48 registers of W for qkv, and 96 for fc. Otherwise several warps
    share a row, also in proj, which has no LayerNorm. These are the fastest of 46 choices for 124M, one row, on an H200
    (190 us a step then; 16 rows of W for fc 193, 16 slices and 8 warps for fc_proj 194, 256 columns for proj 193), and
    among the fastest of 172 for 1558M that leave registers for 16 rows. For any ROWS, the same threads add a row's
    numbers in the same order; tests/kernels/compile_triton.py compares the layouts. A warp has two slices, except for K
    from 1025 to 2048, so that two chains of matmul instructions run independently.

    Programs of neighbouring kernels share the 65,536 registers of a multiprocessor. If one kernel takes too many, the
    next one cannot start early; triton.py has an example.
    """
    if dtype == torch.float32:  # for comparisons of results, not for speed
        # The rows of W pass through shared memory: at most 64 KB, because compute capability 8.6 has only 99. Rows of
        # more than 16,384 columns need more
        rows = min(16, triton.next_power_of_2(16384 // K + 1) // 2)
        return {"BLOCK_N": max(1, rows), "BLOCK_K": 128, "SLICES": 8, "num_warps": 4}
    rows = 8 if 16 * processors > OUT else 16
    if K <= 1024:
        if OUT == K > 512:  # proj
            return {"BLOCK_N": rows, "BLOCK_K": 1024, "SLICES": 8, "num_warps": 4}
        return {"BLOCK_N": 32 if 20 * processors < OUT else rows, "BLOCK_K": 256, "SLICES": 8, "num_warps": 4}
    if K <= 2048:
        return {"BLOCK_N": rows, "BLOCK_K": 2048, "SLICES": 8, "num_warps": 8}
    if K <= 4096:
        return {"BLOCK_N": 8, "BLOCK_K": 1024, "SLICES": 8, "num_warps": 4}
    return {"BLOCK_N": 8, "BLOCK_K": 2048, "SLICES": 16, "num_warps": 8}


def padded_rows(N: int, dtype: torch.dtype) -> int:
    """Return ROWS. In fp32 it is the same for all N, because there no matmul instruction fixes the order of sums.

    It is at least 4, so that each of 4 warps has a row of 256 columns in the same layout for any number of rows.
    """
    return FEW if dtype == torch.float32 else max(4, triton.next_power_of_2(N))


def product(
    step: Step, name: str, x: Tensor | dict, weight: Matrix, bias: Tensor | None = None, **cache: Tensor | None
) -> Tensor:
    """Return x W^T + bias, (N, OUT). For fc the result is its activation, and for qkv the queries, (N, H D).

    x is (N, K), or for qkv and fc the result of add_norm(). `cache` has k_ptr, v_ptr and rope_ptr, for qkv. With only
    v_ptr, the keys are beside the queries, (N, (H + Hkv) D).
    """
    arguments = x if isinstance(x, dict) else {"x_ptr": x}
    kernel = {"qkv": _qkv_kernel, "fc": _fc_kernel}.get(name, _product_kernel)
    if "tokens_ptr" in arguments:
        kernel = _embed_qkv_kernel
    W, scale = split_scales(weight)
    OUT, K = W.shape
    default = product_launch(OUT, K, step.dtype, multiprocessors(step.device))
    launch = step.parameters(name, f"{OUT} {K} {W.dtype}", default)
    out = step.empty(step.N, step.columns(name, OUT))
    step.launch(
        kernel,
        (triton.cdiv(OUT, launch["BLOCK_N"]),),
        **arguments,
        **cache,
        weight_ptr=W,
        scale_ptr=scale,
        bias_ptr=bias,
        out_ptr=out,
        **{"OUT": OUT, "K": K, "ROWS": padded_rows(step.N, step.dtype), **launch},
    )
    return out
