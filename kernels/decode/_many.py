"""The kernels for many rows: one kernel adds and normalises, and matmuls read its rows.

With few rows, every program of a product normalises all rows itself. From 17 rows on this would take longer than one
more kernel. A matmul with a narrow result has too few tiles for all multiprocessors: 24 at 64 rows and 768 columns. So
it splits K, and each program multiplies one part of K. The next LayerNorm adds the parts in order.
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
    load_packed,
    load_vector,
    normalise,
    prefetch,
    store_hidden,
    store_rows,
    wait_for_earlier_kernels,
    zero_counts,
)
from kernels.gpu import multiprocessors, shared_bytes
from kernels.registry import Unavailable

GRID_Y = 65_535  # CUDA's limit
BRANCHES = "proj", "fc_proj"  # the products whose result is added to the residual stream: only they may split K
MAX_PARTS = 8


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _embed_norm_kernel(
    wte_ptr,  # arguments of embed(), like the next four
    wpe_ptr,
    tokens_ptr,
    positions_ptr,
    stream_ptr,
    ln_weight_ptr,  # (K,)
    ln_bias_ptr,
    out_ptr,  # (N, K)
    count_ptr,  # (COUNTS,) int32 or None: see zero_counts()
    N,
    T,
    wpe_rows,
    COUNTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K or more
    PDL: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,  # False: RMSNorm
):
    """The first kernel of a step. The stream begins with the embeddings: out = norm(stream), a row a program."""
    launch_next_kernel(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    k = tl.arange(0, BLOCK_K)
    gains, shifts = (load_packed(ln_weight_ptr, k, K),), (load_packed(ln_bias_ptr, k, K),)
    wait_for_earlier_kernels(PDL)
    zero_counts(count_ptr, COUNTS)
    stream = embed(wte_ptr, wpe_ptr, tokens_ptr, positions_ptr, stream_ptr, row, True, N, T, wpe_rows, K, BLOCK_K)
    y = normalise(stream, gains, shifts, K, BLOCK_K, EPS, CENTRED, dtype)
    _store_row(out_ptr, y, row, K, BLOCK_K)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _norm_kernel(
    x_ptr,  # arguments of add_branch(), like the next three
    x_bias_ptr,
    residual_ptr,
    stream_ptr,
    ln_weight_ptr,  # (K,)
    ln_bias_ptr,
    out_ptr,  # (N, K)
    N,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K or more
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,  # False: RMSNorm
):
    """stream = residual + x; out = norm(stream), a row a program."""
    launch_next_kernel(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    k = tl.arange(0, BLOCK_K)
    gains, shifts = (load_packed(ln_weight_ptr, k, K),), (load_packed(ln_bias_ptr, k, K),)
    wait_for_earlier_kernels(PDL)
    stream = add_branch(x_ptr, residual_ptr, stream_ptr, row, True, N, K, BLOCK_K, x_bias_ptr, PARTS, dtype)
    y = normalise(stream, gains, shifts, K, BLOCK_K, EPS, CENTRED, dtype)
    _store_row(out_ptr, y, row, K, BLOCK_K)


@triton.jit
def _store_row(out_ptr, tiles, row, K: tl.constexpr, BLOCK_K: tl.constexpr):
    k = tl.arange(0, BLOCK_K)[None, :]
    tl.store(out_ptr + row * K + k, tiles[0], k < K)


@triton.jit
def _prefetch_weights(weight_ptr, n, first, last, OUT, K: tl.constexpr, LINES: tl.constexpr):
    """Prefetch the columns first <= k < last of rows n of W. LINES is a power of two, at least their lines a row."""
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    line = tl.minimum(first + tl.arange(0, LINES) * LINE, last - 1)
    prefetch(weight_ptr + tl.minimum(n, OUT - 1).to(tl.int64)[:, None] * K + line[None, :])


@triton.jit
def _multiply_columns(
    x_ptr,
    w_ptr,  # (BLOCK_N, 1): the rows of W
    row,  # (BLOCK_M,) int64
    in_rows,  # (BLOCK_M, 1): the rows that x has
    in_out,  # (BLOCK_N, 1): the rows that W has
    first,
    last,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the product of rows of x and rows of W over the columns first <= k < last, (BLOCK_M, BLOCK_N) fp32."""
    total = tl.zeros((in_rows.shape[0], in_out.shape[0]), tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + row[:, None] * K + k, in_rows & (k < K), other=0.0)
        w = tl.load(w_ptr + k, in_out & (k < K), other=0)
        total = tl.dot(x, w.to(x.dtype).T, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _matmul_qkv_kernel(
    x_ptr,  # arguments of _matmul_kernel, like the next three
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,  # q_ptr of store_qkv(): the queries
    k_ptr,  # arguments of store_qkv(), like the next two
    v_ptr,
    rope_ptr,
    positions_ptr,
    N,
    T,
    cache_rows,
    OUT: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    Q_WIDTH: tl.constexpr,  # H D
    KV_WIDTH: tl.constexpr,  # Hkv D
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q, k, v = x W^T + bias. k and v go into the cache."""
    launch_next_kernel(PDL)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = weight_rows(tl.program_id(1), BLOCK_N, D, rope_ptr is not None)
    w_ptr = weight_ptr + n.to(tl.int64)[:, None] * K
    in_rows, in_out = (row < N)[:, None], (n < OUT)[:, None]
    if PDL and tl.program_id(0) == 0:  # once, as in _matmul_kernel
        _prefetch_weights(weight_ptr, n, 0, K, OUT, K, LINES)
    scale, bias = load_vector(scale_ptr, n, OUT, 1.0), load_vector(bias_ptr, n, OUT, 0.0)
    cache_row = rows_in_cache(row, positions_ptr, N, T, cache_rows)
    wait_for_earlier_kernels(PDL)
    total = _multiply_columns(x_ptr, w_ptr, row, in_rows, in_out, 0, K, K, BLOCK_K, PRECISION)
    y = add_bias(total, scale, bias, out_ptr.dtype.element_ty)
    store_qkv(y, row, n, cache_row, out_ptr, k_ptr, v_ptr, rope_ptr, N, Q_WIDTH, KV_WIDTH, D)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _matmul_kernel(
    x_ptr,  # (N, K)
    weight_ptr,  # (OUT, K)
    scale_ptr,  # (OUT,) fp32 if W is in int8, otherwise None
    bias_ptr,  # (OUT,) or None
    out_ptr,  # (N, OUT), for swiglu (N, OUT / 2); if PARTS > 1 the sums over parts of K, (PARTS, N, OUT) fp32
    N,
    OUT: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,  # see store_hidden(); None: none
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of x of a program
    BLOCK_N: tl.constexpr,  # rows of W of a program
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,  # see _prefetch_weights()
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = x W^T + bias, or its activation. A program multiplies one part of K."""
    launch_next_kernel(PDL)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if ACTIVATION == "swiglu":
        n = weight_rows(tl.program_id(1), BLOCK_N, OUT, True)
    w_ptr = weight_ptr + n.to(tl.int64)[:, None] * K
    in_rows, in_out = (row < N)[:, None], (n < OUT)[:, None]
    PART: tl.constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * PART
    last = min(first + PART, K)
    if PDL and tl.program_id(0) == 0:  # once: 16 requests a line delayed the earlier kernels by 10 us (256 rows, H200)
        _prefetch_weights(weight_ptr, n, first, last, OUT, K, LINES)
    scale, bias = load_vector(scale_ptr, n, OUT, 1.0), load_vector(bias_ptr, n, OUT, 0.0)
    if PARTS > 1:
        out_ptr += tl.program_id(2).to(tl.int64) * N * OUT
    wait_for_earlier_kernels(PDL)
    total = _multiply_columns(x_ptr, w_ptr, row, in_rows, in_out, first, last, K, BLOCK_K, PRECISION)
    y = add_bias(total, scale, bias, out_ptr.dtype.element_ty)
    if ACTIVATION is None:
        store_rows(out_ptr, y, row, n, N, OUT)
    else:
        store_hidden(out_ptr, y, row, n, N, OUT, ACTIVATION)


def matmul_launch(name: str, N: int, OUT: int, K: int, dtype: torch.dtype, processors: int, shared: int) -> dict:
    """Return the default launch parameters of _matmul_kernel and _matmul_qkv_kernel.

    The GPU has `processors` multiprocessors with `shared` bytes of shared memory each.

    They are close to the fastest of 250 to 420 choices for all kernels together, for 124M on an H200: 417 us for a step
    of 64 rows, and 901 us for 256. With the former tiles, mostly 64 x 128 and 3 stages, it was 467 and 933 us. Small
    tiles give every multiprocessor work. A program makes only 3 to 12 steps over K, so 5 stages hold most of its loads.
    """
    if dtype == torch.float32:  # for comparisons of results, not for speed
        blocks = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1}
    else:
        blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
        if name == "head" and N > 64:
            blocks |= {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8}
        elif name == "head":
            blocks |= {"BLOCK_K": 64, "num_stages": 4}
        elif N <= 64 or name == "proj":
            blocks |= {"BLOCK_N": 32, "BLOCK_K": 64 if name == "qkv" else 128, "num_stages": 5}
        elif name == "fc_proj":
            blocks |= {"BLOCK_K": 64, "num_stages": 5}
    parts = 1
    if name in BRANCHES:
        programs = triton.cdiv(N, blocks["BLOCK_M"]) * triton.cdiv(OUT, blocks["BLOCK_N"])
        tile = (blocks["BLOCK_M"] + blocks["BLOCK_N"]) * blocks["BLOCK_K"] * dtype.itemsize
        fitting = processors * (2 if 2 * tile * blocks["num_stages"] <= shared else 1)
        parts = max(1, min(fitting // programs, MAX_PARTS, K // (2 * blocks["BLOCK_K"])))
    return {**blocks, "PARTS": 2 ** (parts.bit_length() - 1)}


def norm(step: Step, arguments: dict) -> Tensor:
    """Add and normalise in one kernel, and return the rows (N, C). `arguments` are the result of add_norm()."""
    C = len(arguments["ln_weight_ptr"])
    y = step.empty(step.N, C)
    sizes = {"K": C, "BLOCK_K": triton.next_power_of_2(C)}
    if "tokens_ptr" in arguments:
        kernel = _embed_norm_kernel
    else:
        kernel, x = _norm_kernel, arguments["x_ptr"]
        sizes["PARTS"] = len(x) if x.dim() == 3 else 0
    step.launch(kernel, (step.N,), **arguments, **sizes, out_ptr=y, num_warps=4)
    return y


def product(
    step: Step, name: str, x: Tensor | dict, weight: Matrix, bias: Tensor | None = None, **cache: Tensor | None
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Do what product() of _few.py does, for many rows. Return (sums over parts of K, bias) if K is split.

    The sums are (PARTS, N, OUT) in fp32. Raises Unavailable if W has more tiles of rows than a grid can have.
    """
    x = norm(step, x) if isinstance(x, dict) else x
    W, scale = split_scales(weight)
    OUT, K = W.shape
    processors, shared = multiprocessors(step.device), shared_bytes(step.device)
    default = matmul_launch(name, step.N, OUT, K, step.dtype, processors, shared)
    launch = step.parameters(f"{name}_{default['BLOCK_M']}_rows", f"{OUT} {K} {W.dtype}", default)
    parts = launch["PARTS"]
    grid = triton.cdiv(step.N, launch["BLOCK_M"]), triton.cdiv(OUT, launch["BLOCK_N"]), parts
    if grid[1] > GRID_Y:
        raise Unavailable(
            f"{name} has {OUT:,} rows, and with more than {FEW} tokens a step our Triton decoders take at most "
            f"{GRID_Y * launch['BLOCK_N']:,}: choose kernels.decode=blocks"
        )
    part = triton.cdiv(K, parts * launch["BLOCK_K"]) * launch["BLOCK_K"]  # columns
    shape, dtype = (step.N, step.columns(name, OUT)), None
    if name == "qkv":  # it never splits K
        kernel = _matmul_qkv_kernel
        del launch["PARTS"]
    else:
        kernel = _matmul_kernel
        launch["ACTIVATION"] = step.weights.mlp if name == "fc" else None
        if parts > 1:
            shape, dtype = (parts, step.N, OUT), torch.float32
    out = step.empty(*shape, dtype=dtype)
    step.launch(
        kernel,
        grid,
        x_ptr=x,
        **cache,
        weight_ptr=W,
        scale_ptr=scale,
        bias_ptr=bias if parts == 1 else None,
        out_ptr=out,
        LINES=triton.next_power_of_2(triton.cdiv(part * W.element_size(), 128)),
        **{"OUT": OUT, "K": K, **launch},
    )
    return out if parts == 1 else (out, bias)
