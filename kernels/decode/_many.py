"""The kernels for many rows: one kernel adds and normalises, and matmuls read its rows.

With few rows, every program of a product normalises all rows itself. From 17 rows on this would take longer than one
more kernel. A matmul with a narrow result has too few tiles for all multiprocessors: 24 at 64 rows and 768 columns. So
it splits K, and each program multiplies one part of K. The next LayerNorm adds the parts in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode._step import FEW, Step, matrix
from kernels.decode._tiles import (
    cache_places,
    launch_next_kernel,
    load_packed,
    load_stream,
    load_vector,
    normalise,
    prefetch,
    store_result,
    wait_for_earlier_kernels,
    weight_rows,
    zero_counts,
)
from kernels.gpu import multiprocessors, shared_bytes
from kernels.registry import Unavailable

GRID_Y = 65_535  # CUDA's limit
BRANCHES = "proj", "fc_proj"  # the products whose result is added to the residual stream: only they may split K
MAX_PARTS = 8
COUNTS = ["N", "T", "wpe_rows", "cache_rows"]  # not specialised, so another batch, model or cache compiles nothing


@triton.jit(do_not_specialize=COUNTS)
def _norm_kernel(
    x_ptr,  # an argument of load_stream(), like the next six
    x_bias_ptr,
    residual_ptr,
    stream_ptr,
    tokens_ptr,
    wpe_ptr,
    positions_ptr,
    ln_weight_ptr,
    ln_bias_ptr,
    out_ptr,  # (N, K)
    count_ptr,  # (COUNTS,) int32 or None: see zero_counts()
    N,
    T,
    wpe_rows,
    COUNTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a branch to the residual stream and normalise the sum. Each program takes one row."""
    launch_next_kernel(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    k = tl.arange(0, BLOCK_K)
    gains, shifts = (load_packed(ln_weight_ptr, k, K),), (load_packed(ln_bias_ptr, k, K),)
    wait_for_earlier_kernels(PDL)
    zero_counts(count_ptr, COUNTS)
    stream = load_stream(
        *(x_ptr, x_bias_ptr, residual_ptr, stream_ptr, tokens_ptr, wpe_ptr, positions_ptr),
        *(row, True, N, T, wpe_rows, K, BLOCK_K, PARTS, dtype),
    )
    rows = normalise(stream, gains, shifts, K, BLOCK_K, dtype)
    tl.store(out_ptr + row * K + k[None, :], rows[0], (k < K)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def _matmul_kernel(
    x_ptr,  # (N, K)
    positions_ptr,
    weight_ptr,  # (OUT, K)
    scale_ptr,
    bias_ptr,
    out_ptr,  # an argument of store_result(); if PARTS > 1 the sums over parts of K, (PARTS, N, OUT) fp32
    rope_ptr,
    k_ptr,
    v_ptr,
    N,
    T,
    cache_rows,
    OUT: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    GELU: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,  # lines of 128 bytes of a row of W in a part of K, or more: a power of two
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply BLOCK_M rows of x with BLOCK_N rows of W, over one part of K."""
    launch_next_kernel(PDL)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = weight_rows(tl.program_id(1), BLOCK_N, D, rope_ptr is not None)
    w_ptr = weight_ptr + n.to(tl.int64)[:, None] * K
    in_rows, in_out = (row < N)[:, None], (n < OUT)[:, None]
    PART: tl.constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * PART
    if PDL and tl.program_id(0) == 0:  # once: 16 requests a line delayed the earlier kernels by 10 us (256 rows, H200)
        LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
        line = tl.minimum(first + tl.arange(0, LINES) * LINE, min(first + PART, K) - 1)
        prefetch(weight_ptr + tl.minimum(n, OUT - 1).to(tl.int64)[:, None] * K + line[None, :])
    scale, bias = load_vector(scale_ptr, n, OUT, 1.0), load_vector(bias_ptr, n, OUT, 0.0)
    place = row
    if k_ptr is not None:
        place = cache_places(row, positions_ptr, N, T, cache_rows)
    if PARTS > 1:
        out_ptr += tl.program_id(2).to(tl.int64) * N * OUT
    wait_for_earlier_kernels(PDL)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, min(first + PART, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + row[:, None] * K + k, in_rows & (k < K), other=0.0)
        w = tl.load(w_ptr + k, in_out & (k < K), other=0)
        total = tl.dot(x, w.to(x.dtype).T, total, input_precision=PRECISION)
    store_result(
        *(total, row, n, scale, bias, place, out_ptr, rope_ptr, k_ptr, v_ptr),
        *(N, OUT, GELU, Q_WIDTH, KV_WIDTH, D),
    )


def matmul_launch(name: str, N: int, OUT: int, K: int, dtype: torch.dtype, processors: int, shared: int) -> dict:
    """Return the default launch parameters of _matmul_kernel.

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
    x, C = arguments["x_ptr"], len(arguments["ln_weight_ptr"])
    y = step.empty(step.N, C)
    sizes = {"K": C, "BLOCK_K": triton.next_power_of_2(C), "PARTS": len(x) if x.dim() == 3 else 0}
    step.launch(_norm_kernel, (step.N,), **arguments, **sizes, out_ptr=y, num_warps=4)
    return y


def matmul(step: Step, name: str, x: Tensor, weight, bias: Tensor | None, width: int, **result):
    """Return x W^T + bias, (N, width). If K is split, return (sums over parts of K (PARTS, N, OUT) fp32, bias).

    Raises Unavailable if W has more tiles of rows than a grid can have.
    """
    W, scale = matrix(weight)
    OUT, K = W.shape
    processors, shared = multiprocessors(step.device), shared_bytes(step.device)
    default = matmul_launch(name, step.N, OUT, K, step.dtype, processors, shared)
    launch = step.parameters(f"{name}_{default['BLOCK_M']}_rows", f"{OUT} {K} {W.dtype}", default)
    grid = triton.cdiv(step.N, launch["BLOCK_M"]), triton.cdiv(OUT, launch["BLOCK_N"]), launch["PARTS"]
    if grid[1] > GRID_Y:
        raise Unavailable(
            f"{name} has {OUT:,} rows, and with more than {FEW} tokens a step our Triton decoders take at most "
            f"{GRID_Y * launch['BLOCK_N']:,}: choose kernels.decode=blocks"
        )
    parts = launch["PARTS"]
    part = triton.cdiv(K, parts * launch["BLOCK_K"]) * launch["BLOCK_K"]  # columns
    out = step.empty(step.N, width) if parts == 1 else step.empty(parts, step.N, OUT, dtype=torch.float32)
    step.launch(
        _matmul_kernel,
        grid,
        x_ptr=x,
        weight_ptr=W,
        scale_ptr=scale,
        bias_ptr=bias if parts == 1 else None,
        out_ptr=out,
        LINES=triton.next_power_of_2(triton.cdiv(part * W.element_size(), 128)),
        **{"OUT": OUT, "K": K, **result, **launch},
    )
    return out if parts == 1 else (out, bias)
