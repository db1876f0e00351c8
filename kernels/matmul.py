"""Matmuls in Triton, and the parts that a kernel needs to do its own work in a matmul's epilogue.

A program computes a tile of y = x W^T. It walks over the sum, BLOCK_C channels at a time: it loads a tile of x and a
tile of W, and adds their product to a sum in registers. Then comes the epilogue: it adds the bias, rounds and stores.
A matmul of 65,536 x 768 by 768 x 3072 takes 309 GFLOP. On an H200 cuBLAS takes 422 us for it, 732 TFLOP/s, and this
kernel 444. Four things decide the time:

    loads       On compute capability 9.0 and 10.0 a tile moves by TMA: one thread asks for a whole tile. Other GPUs
                load with pointers, as does a matrix whose rows are no multiple of 16 bytes.
    pipeline    Triton loads the next tiles while it multiplies. The loop over the tiles and the loop over the sum are
                one loop (flatten=True), so the loads of the next tile begin before the epilogue of this tile. Without
                it the matmul above takes 481 us.
    epilogue    The tensor cores wait for it. If it is short beside the sum, one large tile a multiprocessor is best,
                128 x 256. Otherwise two programs share a multiprocessor, with tiles of 128 x 128: one stores while the
                other multiplies.
    registers   split_columns() gives the epilogue the tile in parts of a few columns, because the copies that it makes
                of a whole tile would not fit into registers.

dW = dy^T x has few tiles and a long sum, over all tokens. matmul_transposed() cuts the sum into parts that other
programs compute, and adds the parts in a fixed order. So two runs give the same bits.

Microseconds on one H200 in bf16, in one run (2026-11-27), each beside cuBLAS, for linear's QKV at 65,536 tokens of 768
channels: forward 339 and 322, dx 316 and 307, dW 328 and 328. The order of the tiles is from tiles.py.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu import has_tma, make_context_current, multiprocessors
from kernels.quantize import INTERPRETED
from kernels.split import split_sum
from kernels.sums import add_partial_sums
from kernels.tiles import place
from kernels.tuned import launch_parameters

ROUND_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
ROUND_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
ROUND_BOTH_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $3, $2; cvt.rn.bf16x2.f32 $1, $5, $4;")
ROUND_BOTH_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;")
FP32_LAUNCH = 64, 128, 64, 1, 8, 1, 1  # for comparisons of results, not for speed: the matmuls are fp32, not TF32


@triton.jit
def load_matrix_tile(
    source, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr, stride=None
):
    """Return a tile (ROWS, COLUMNS) of a matrix (rows, columns), with 0 outside of the matrix.

    `source` is kernel_argument() of the matrix. `stride` is the distance of its rows; None: they are contiguous.
    """
    if TMA:
        tile = source.load([row, column])
    else:
        r, c = row + tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
        distance = columns if stride is None else stride
        tile = tl.load(source + r.to(tl.int64) * distance + c, (r < rows) & (c < columns), other=0.0)
    return tile


@triton.jit
def store_matrix_tile(target, tile, row, column, rows, columns, TMA: tl.constexpr, stride=None):
    """Store a tile where load_matrix_tile() would load it, and drop what lies outside of the matrix."""
    if TMA:
        target.store([row, column], tile)
    else:
        r, c = row + tl.arange(0, tile.shape[0])[:, None], column + tl.arange(0, tile.shape[1])[None, :]
        distance = columns if stride is None else stride
        tl.store(target + r.to(tl.int64) * distance + c, tile, (r < rows) & (c < columns))


@triton.jit
def load_gated_tile(w, f, c, F, C, UNITS: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr):
    """Return a tile (2 UNITS, BLOCK_C) of w (2, F, C): rows f to f + UNITS of each of its two matrices."""
    if TMA:
        tile = w.load([0, f, c]).reshape(2 * UNITS, BLOCK_C)
    else:
        row = tl.arange(0, 2 * UNITS)[:, None]
        r, columns = f + row % UNITS, c + tl.arange(0, BLOCK_C)[None, :]
        offsets = (row // UNITS * F + r).to(tl.int64) * C + columns
        tile = tl.load(w + offsets, (r < F) & (columns < C), other=0.0)
    return tile


@triton.jit
def multiply_tile(
    x,  # (N, C)
    w,  # (F, C) if W_BY_ROWS, and otherwise (C, F); with GATED (2, F, C)
    n,
    f,
    N,
    F,
    C,
    W_BY_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    GATED: tl.constexpr = False,
):
    """Return the tile (BLOCK_N, BLOCK_F) of x W^T, or of x W, whose first row is n and whose first column is f.

    With GATED, half of the columns are of each of the two matrices in w.
    """
    tl.assume(C > 0)  # or Triton also compiles the epilogue of an empty sum: as many instructions again
    total = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
    for c in range(0, C, BLOCK_C):
        x_tile = load_matrix_tile(x, n, c, N, C, BLOCK_N, BLOCK_C, TMA)
        if GATED:
            w_tile = load_gated_tile(w, f, c, F, C, BLOCK_F // 2, BLOCK_C, TMA).T
        elif W_BY_ROWS:
            w_tile = load_matrix_tile(w, f, c, F, C, BLOCK_F, BLOCK_C, TMA).T
        else:
            w_tile = load_matrix_tile(w, c, f, C, F, BLOCK_C, BLOCK_F, TMA)
        total = tl.dot(x_tile, w_tile, total, input_precision=PRECISION)
    return total


@triton.jit
def split_columns(tile, COUNT: tl.constexpr):
    """Split a tile's columns into COUNT parts, a power of two. On Hopper no data moves."""
    parts = (tile,)
    for _ in tl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for i in tl.static_range(len(parts)):
            part = parts[i]
            halves += part.reshape(part.shape[0], 2, part.shape[1] // 2).permute(0, 2, 1).split()
        parts = halves
    return parts


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Return x.to(dtype). It rounds two numbers in one instruction (F2FP).

    Triton does so, too, unless the result is converted back to fp32. Then it rounds one number at a time (F2F), which
    takes 16 times as long.
    """
    if INTERPRETED or dtype == tl.float32:
        out = x.to(dtype)
    elif dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(ROUND_BF16, "=r,f,f", [x], tl.bfloat16, is_pure=True, pack=2)
    else:
        out = tl.inline_asm_elementwise(ROUND_FP16, "=r,f,f", [x], tl.float16, is_pure=True, pack=2)
    return out


@triton.jit
def round_both(x, y, dtype: tl.constexpr):
    """Return round_to() of x and of y, in one layout.

    If y depends on a loaded tile, Triton gives y another layout than x, and does y's elementwise work twice: the MLP's
    backward on an H200 takes 880 us instead of 760.
    """
    if INTERPRETED or dtype == tl.float32:
        out = x.to(dtype), y.to(dtype)
    elif dtype == tl.bfloat16:
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        out = tl.inline_asm_elementwise(ROUND_BOTH_BF16, "=&r,=r,f,f,f,f", [x, y], types, is_pure=True, pack=2)
    else:
        types: tl.constexpr = (tl.float16, tl.float16)
        out = tl.inline_asm_elementwise(ROUND_BOTH_FP16, "=&r,=r,f,f,f,f", [x, y], types, is_pure=True, pack=2)
    return out


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _tiled_matmul_kernel(
    x,  # (N, C)
    w,  # (F, C) if W_BY_ROWS, and otherwise (C, F)
    bias_ptr,  # (F,), or None
    y,  # (N, F)
    N,
    F,
    C,
    W_BY_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y = x W^T + bias, or x W + bias."""
    WIDTH: tl.constexpr = BLOCK_F // PARTS
    tiles_n, tiles_f = tl.cdiv(N, BLOCK_N), tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_f, tl.num_programs(0), flatten=True):
        tile_n, tile_f = place(tile, tiles_n, tiles_f, GROUP)
        n, f = tile_n * BLOCK_N, tile_f * BLOCK_F
        total = multiply_tile(x, w, n, f, N, F, C, W_BY_ROWS, BLOCK_N, BLOCK_F, BLOCK_C, TMA, PRECISION)
        parts = split_columns(total, PARTS)
        for i in tl.static_range(PARTS):
            part = parts[i]
            if bias_ptr is not None:
                columns = f + i * WIDTH + tl.arange(0, WIDTH)
                part += tl.load(bias_ptr + columns, columns < F, other=0.0).to(tl.float32)[None, :]
            store_matrix_tile(y, round_to(part, x.dtype if TMA else x.dtype.element_ty), n, f + i * WIDTH, N, F, TMA)


@triton.jit(do_not_specialize=["N", "steps", "splits"])
def _split_matmul_kernel(
    a,  # (N, F)
    b,  # (N, C)
    out,  # (splits, F, C)
    N,
    F,
    C,
    steps,  # blocks of rows in a part of the sum
    splits,
    BLOCK_N: tl.constexpr,  # rows that are added at once
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out[split] = a^T b over the rows of this part of the sum."""
    WIDTH: tl.constexpr = BLOCK_C // PARTS
    dtype: tl.constexpr = out.dtype if TMA else out.dtype.element_ty
    tiles_f, tiles_c = tl.cdiv(F, BLOCK_F), tl.cdiv(C, BLOCK_C)
    tl.assume(steps > 0)
    for item in tl.range(tl.program_id(0), tiles_f * tiles_c * splits, tl.num_programs(0), flatten=True):
        tile_f, tile_c = place(item % (tiles_f * tiles_c), tiles_f, tiles_c, GROUP)
        split, f, c = item // (tiles_f * tiles_c), tile_f * BLOCK_F, tile_c * BLOCK_C
        total = tl.zeros((BLOCK_F, BLOCK_C), tl.float32)
        for step in range(steps):
            n = (split * steps + step) * BLOCK_N  # beyond N the tiles are 0
            a_tile = load_matrix_tile(a, n, f, N, F, BLOCK_N, BLOCK_F, TMA)
            b_tile = load_matrix_tile(b, n, c, N, C, BLOCK_N, BLOCK_C, TMA)
            total = tl.dot(a_tile.T, b_tile, total, input_precision=PRECISION)
        parts = split_columns(total, PARTS)
        for j in tl.static_range(PARTS):
            tile = round_to(parts[j], dtype)
            if TMA:
                out.store([split, f, c + j * WIDTH], tile.reshape(1, BLOCK_F, WIDTH))
            else:
                matrix = out + split.to(tl.int64) * F * C
                store_matrix_tile(matrix, tile, f, c + j * WIDTH, F, C, False)


def can_use_tma(*matrices: Tensor) -> bool:
    """Return whether kernels move tiles of these matrices by TMA: rows and addresses of 16-byte multiples.

    A row is contiguous, and ends where the next begins, or it is a part of a longer one. For fp32 they do not use it.
    """
    if not has_tma(matrices[0].device) or matrices[0].dtype == torch.float32:
        return False
    return all(map(has_aligned_rows, matrices))


def has_aligned_rows(matrix: Tensor) -> bool:
    """Return whether the address, the length and the distance of the rows are multiples of 16 bytes."""
    length = matrix.shape[-1]
    distance = length if matrix.is_contiguous() else matrix.stride(-2)  # the stride of a single row may be any number
    sizes = length * matrix.element_size(), distance * matrix.element_size(), matrix.data_ptr()
    return all(size % 16 == 0 for size in sizes)


def kernel_argument(tensor: Tensor | None, *block: int, tma: bool) -> TensorDescriptor | Tensor | None:
    """Return what a kernel takes for a tensor: the tensor, or a TMA descriptor of tiles of shape `block`."""
    if tensor is None or not tma:
        return tensor
    strides = list(tensor.stride())
    if tensor.is_contiguous():  # the stride of a single row may be any number, and TMA needs a multiple of 16 bytes
        strides = [math.prod(tensor.shape[i + 1 :]) for i in range(tensor.ndim)]
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(block))


def precision(dtype: torch.dtype) -> str:
    """Return tl.dot()'s input_precision. It matters only for fp32, which must not become TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def as_parameters(
    BLOCK_N: int, BLOCK_F: int, BLOCK_C: int, PARTS: int, num_warps: int, num_stages: int, programs: int
) -> dict:
    """Return launch parameters. `programs` is the number of programs a multiprocessor, which choose_launch() takes."""
    tile = {"BLOCK_N": BLOCK_N, "BLOCK_F": BLOCK_F, "BLOCK_C": BLOCK_C, "PARTS": PARTS}
    return tile | {"num_warps": num_warps, "num_stages": num_stages, "programs": programs}


def default_launch(dtype: torch.dtype, tma: bool, C: int) -> dict:
    """Return the default launch parameters of a matmul that sums over C.

    A short sum takes about as long as its epilogue, so two programs share a multiprocessor. Without TMA the parameters
    fit into the 99 KB of shared memory of compute capability 8.6.
    """
    if dtype == torch.float32:
        values = FP32_LAUNCH
    elif tma and C <= 1024:
        values = 128, 128, 64, 2, 4, 3, 2
    elif tma:
        values = 128, 256, 64, 4, 8, 3, 1
    else:
        values = 128, 128, 32, 4, 8, 4, 1
    return as_parameters(*values) | {"GROUP": 8}


def default_launch_transposed(dtype: torch.dtype, tma: bool, F: int, C: int) -> dict:
    """Return the default launch parameters of matmul_transposed() for a result (F, C).

    A tile of 256 columns covers 1600 columns with 12% waste, and one of 128 with 4%. For (4800, 1600) on an H200 tiles
    of 256 x 128 take 0.71 ms where 128 x 256 take 0.81.
    """
    if dtype == torch.float32:
        values = 64, 64, 128, 1, 8, 1, 1
    elif tma and padded(F, 256) * padded(C, 128) < padded(F, 128) * padded(C, 256):
        values = 64, 256, 128, 4, 8, 4, 1
    elif tma:
        values = 64, 128, 256, 4, 8, 3, 1
    else:
        values = 32, 128, 128, 1, 8, 3, 1
    return as_parameters(*values) | {"GROUP": 8}


def padded(size: int, tile: int) -> int:
    return triton.cdiv(size, tile) * tile


def candidates(kernel: str, default: dict) -> list[dict]:
    """Return the launch parameters that scripts/tune.py tries for a plain matmul."""
    if kernel.endswith("_dw"):
        choices = [(64, 128, 256, 4, 8, 4, 1), (64, 128, 128, 2, 8, 4, 1), (32, 128, 128, 1, 8, 4, 1)]
        choices += [(32, 128, 128, 1, 4, 4, 2), (32, 128, 64, 1, 4, 4, 2), (32, 64, 128, 1, 4, 4, 2)]
    else:
        choices = [(128, 256, 64, 4, 8, 3, 1), (128, 128, 64, 2, 4, 3, 2), (128, 128, 32, 1, 8, 4, 2)]
        choices += [(128, 128, 32, 1, 4, 4, 2), (128, 64, 32, 1, 4, 4, 2), (64, 128, 32, 1, 4, 4, 2)]
    return [as_parameters(*choice) for choice in choices] + [{"GROUP": 4}, {"GROUP": 16}]


def choose_launch(kernel: str, x: Tensor, F: int, tma: bool, default: dict) -> tuple[tuple[int], dict]:
    """Return the grid and the launch parameters of a kernel that computes a matrix (N, F) of sums over x's C columns.

    `kernel` is the name of the entries in the tables of launch parameters. It makes the GPU's context current for TMA.
    """
    key = f"{x.shape[1]} {F} {x.dtype}{' tma' if tma else ''}"
    launch = launch_parameters(kernel, key, default, x.device)
    programs = launch.pop("programs") * multiprocessors(x.device)
    tiles = triton.cdiv(len(x), launch["BLOCK_N"]) * triton.cdiv(F, launch["BLOCK_F"])
    make_context_current()
    return (min(tiles, programs),), launch


def matmul(kernel: str, x: Tensor, w: Tensor, bias: Tensor | None = None, w_by_rows: bool = True) -> Tensor:
    """Return x w^T + bias (N, F) for contiguous x (N, C), w (F, C) and bias (F,) or None; x w + bias for w (C, F).

    `kernel` is the name of the entries in the tables of launch parameters.
    """
    N, C = x.shape
    F = w.shape[0] if w_by_rows else w.shape[1]
    y = x.new_empty(N, F)
    tma = can_use_tma(x, w, y)
    grid, launch = choose_launch(kernel, x, F, tma, default_launch(x.dtype, tma, C))
    n, f, c = (launch[name] for name in ("BLOCK_N", "BLOCK_F", "BLOCK_C"))
    _tiled_matmul_kernel[grid](
        x=kernel_argument(x, n, c, tma=tma),
        w=kernel_argument(w, *((f, c) if w_by_rows else (c, f)), tma=tma),
        bias_ptr=bias,
        y=kernel_argument(y, n, f // launch["PARTS"], tma=tma),
        N=N,
        F=F,
        C=C,
        W_BY_ROWS=w_by_rows,
        TMA=tma,
        PRECISION=precision(x.dtype),
        **launch,
    )
    return y


def matmul_transposed(kernel: str, a: Tensor, b: Tensor) -> Tensor:
    """Return a^T b (F, C) in the dtype of a, for contiguous a (N, F) and b (N, C), N > 0. It sums in fp32."""
    N, F = a.shape
    C = b.shape[1]
    tma = can_use_tma(a, b)
    key = f"{F} {C} {a.dtype}{' tma' if tma else ''}"
    launch = launch_parameters(kernel, key, default_launch_transposed(a.dtype, tma, F, C), a.device)
    programs = launch.pop("programs") * multiprocessors(a.device)
    n, f, c = (launch[name] for name in ("BLOCK_N", "BLOCK_F", "BLOCK_C"))
    tiles = triton.cdiv(F, f) * triton.cdiv(C, c)
    splits, steps = split_sum(triton.cdiv(N, n), tiles, programs)
    out = torch.empty(splits, F, C, dtype=a.dtype if splits == 1 else torch.float32, device=a.device)
    make_context_current()
    _split_matmul_kernel[(min(tiles * splits, programs),)](
        a=kernel_argument(a, n, f, tma=tma),
        b=kernel_argument(b, n, c, tma=tma),
        out=kernel_argument(out, 1, f, c // launch["PARTS"], tma=tma),
        N=N,
        F=F,
        C=C,
        steps=steps,
        splits=splits,
        TMA=tma,
        PRECISION=precision(a.dtype),
        **launch,
    )
    return out[0] if splits == 1 else add_partial_sums(out.view(splits, F * C), a.dtype).view(F, C)
