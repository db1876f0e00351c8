"""Round a matrix to fp8 in one pass, and write it twice: row by row, and column by column.

A tensor core needs both operands of an fp8 product contiguous along the dimension that is summed. The three products of
a linear layer sum along different dimensions, so each operand is needed in two layouts:

    y  = x W^T     x by rows, W by rows
    dx = dy W      dy by rows, W by columns
    dW = dy^T x    dy by columns, x by columns

By rows is the matrix (N, C); by columns is its transpose (C, N), contiguous. A separate transpose would read and write
the tensor again. The kernel below holds a tile in registers, and rounds it twice: four neighbours of a row to one word,
and then four neighbours of a column. So it never moves single bytes, which would take twice as many instructions. A
version that rounded once and transposed took 255 registers a thread instead of 109, and 6.8 ms for the gradient of the
logits in a step of 124M (H200). This one takes 3.5, and a copy of these bytes 3.2. It also sums the rows of its tile,
because the sum of dy's rows is the gradient of the bias. As in kernels/fp8.py, infinities become NaN, and other numbers
beyond the range become the largest one.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compat import is_observed
from kernels.direct import custom_op
from kernels.fp8 import DY_SCALE, E4M3, X_SCALE, InFp8
from kernels.sums import add_partial_sums
from kernels.tiles import place
from kernels.tuned import launch_parameters

MULTIPLE = tl.constexpr(16)  # a row of an operand must be a multiple of 16 bytes
NAMES = "BLOCK_N", "BLOCK_C", "GROUP", "num_warps"
MAX_PROGRAMS, MAXIMA_LAUNCH = 512, {"BLOCK": 8192, "num_warps": 8}  # the best of six choices on an H100
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ROUND = """{
    .reg .b16 low, high;
    cvt.rn.satfinite.%sx2.f32 low, $2, $1;
    cvt.rn.satfinite.%sx2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}"""
_units: dict[tuple[float, torch.device], Tensor] = {}
ROUND_E4M3, ROUND_E5M2 = (tl.constexpr(ROUND % (name, name)) for name in ("e4m3", "e5m2"))


@triton.jit
def scaled(x, scale):
    """Return x times scale. Adding 0 x turns an infinity into NaN, which to_fp8() and to_words() keep."""
    return x * scale + 0.0 * x


@triton.jit
def to_fp8(x, dtype: tl.constexpr):
    """Round x from fp32 to fp8.

    Triton converts two numbers to half a word, and ptxas 12.9 and older may read the half before it is written
    (triton-lang/triton issue 11111). The assembly makes a whole word of four numbers.
    """
    if INTERPRETED:  # the interpreter runs no assembly, and its conversion does not saturate
        LARGEST: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
        tile = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    elif dtype == tl.float8e4nv:
        tile = tl.inline_asm_elementwise(ROUND_E4M3, "=r,f,f,f,f", [x], tl.float8e4nv, is_pure=True, pack=4)
    else:
        tile = tl.inline_asm_elementwise(ROUND_E5M2, "=r,f,f,f,f", [x], tl.float8e5, is_pure=True, pack=4)
    return tile


@triton.jit
def to_words(x0, x1, x2, x3, dtype: tl.constexpr):
    """Round four matrices to fp8, and return a matrix of words. The bytes of a word are from x0, x1, x2 and x3.

    The assembly is marked impure, or Triton would compute x0 to x3 twice, once for each layout of the output.
    """
    if INTERPRETED:
        words = to_fp8(x0, dtype).to(tl.uint8, bitcast=True).to(tl.uint32)
        words |= to_fp8(x1, dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        words |= to_fp8(x2, dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
        words |= to_fp8(x3, dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 24
    elif dtype == tl.float8e4nv:
        words = tl.inline_asm_elementwise(ROUND_E4M3, "=r,f,f,f,f", [x0, x1, x2, x3], tl.uint32, is_pure=False, pack=1)
    else:
        words = tl.inline_asm_elementwise(ROUND_E5M2, "=r,f,f,f,f", [x0, x1, x2, x3], tl.uint32, is_pure=False, pack=1)
    return words


@triton.jit
def tile_of_program(N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr):
    """Return the program's row of tiles in an (N, C) matrix, its groups of four rows, and its columns."""
    tile_n, tile_c = place(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.cdiv(C, BLOCK_C), GROUP)
    quads = tile_n * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    return tile_n, quads, tile_c * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def load_rows(x_ptr, n, c, N, C, other, stride=None):
    """Return rows n and columns c of an (N, C) matrix in fp32, and `other` outside it.

    `stride` is the distance of its rows; None: they are contiguous.
    """
    mask = (n < N)[:, None] & (c < C)[None, :]
    distance = C if stride is None else stride
    return tl.load(x_ptr + n.to(tl.int64)[:, None] * distance + c[None, :], mask, other=other).to(tl.float32)


@triton.jit
def _store_row(x, rows_ptr, n, c, N, C, stride):
    mask = (n < N)[:, None] & (c < C)[None, :]
    tl.store(rows_ptr + n.to(tl.int64)[:, None] * stride + c[None, :], to_fp8(x, rows_ptr.dtype.element_ty), mask)


@triton.jit
def store_rows(x0, x1, x2, x3, rows_ptr, quads, c, N, C, stride=None):
    """Round rows 4 quads, 4 quads + 1, 4 quads + 2 and 4 quads + 3 to fp8, and store columns c of them by rows.

    Rows end with zeros up to a multiple of 16. With `stride`, the distance of rows of more than C numbers, they do not.
    """
    width = C if stride is not None else tl.cdiv(C, MULTIPLE) * MULTIPLE
    distance = width if stride is None else stride
    _store_row(x0, rows_ptr, 4 * quads, c, N, width, distance)
    _store_row(x1, rows_ptr, 4 * quads + 1, c, N, width, distance)
    _store_row(x2, rows_ptr, 4 * quads + 2, c, N, width, distance)
    _store_row(x3, rows_ptr, 4 * quads + 3, c, N, width, distance)


@triton.jit
def store_columns(x0, x1, x2, x3, columns_ptr, quads, c, N, C, all_rows=None):
    """Round the rows of store_rows() to fp8, and store columns c of them by columns.

    Columns end with zeros up to a multiple of 16. If the N rows are a part of a matrix, `all_rows` is its number of
    rows, and columns_ptr points to the first of the N.
    """
    height = tl.cdiv(N, MULTIPLE) * (MULTIPLE // 4)  # in words
    stride = height if all_rows is None else tl.cdiv(all_rows, MULTIPLE) * (MULTIPLE // 4)
    words = to_words(x0, x1, x2, x3, columns_ptr.dtype.element_ty)
    words_ptr = columns_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    offsets = c.to(tl.int64)[:, None] * stride + quads[None, :]
    tl.store(words_ptr + offsets, tl.trans(words), (c < C)[:, None] & (quads < height)[None, :])


@triton.jit
def weight_scale(largest):
    """Return the largest power of two at which `largest` fits in e4m3, by the rule of kernels/fp8.py."""
    ratio = tl.div_rn(448.0, tl.maximum(largest, 2.0**-60))  # plain division may be off by a bit
    exponent = ratio.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(largest < float("inf"), exponent.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _maxima_kernel(
    x_ptr,  # (n,)
    maxima_ptr,  # (programs,) fp32
    n,
    BLOCK: tl.constexpr,
):
    """Store the largest absolute value of each program's elements, or infinity if one of them is NaN."""
    largest = tl.zeros((BLOCK,), tl.float32)
    # int64: n, and the counter of the loop after the last element, may pass 2^31
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.abs(tl.load(x_ptr + i, i < n, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.where(x < float("inf"), x, float("inf")))
    tl.store(maxima_ptr + tl.program_id(0), tl.max(largest, 0))


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _quantize_kernel(
    x_ptr,  # (N, C)
    maxima_ptr,  # (MAXIMA,) fp32, of the parts of a weight; None for other tensors
    unit_ptr,  # 1 / scale, fp32; written for a weight, and read otherwise
    rows_ptr,  # (N, C rounded up to a multiple of 16) in fp8
    columns_ptr,  # (C, N rounded up to a multiple of 16) in fp8; or None
    sums_ptr,  # (tiles along N, C) fp32, the sums of x's rows in each tile; or None
    N,
    C,
    MAXIMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_n, quads, c = tile_of_program(N, C, BLOCK_N, BLOCK_C, GROUP)
    n = 4 * quads
    x0, x1 = load_rows(x_ptr, n, c, N, C, 0.0), load_rows(x_ptr, n + 1, c, N, C, 0.0)
    x2, x3 = load_rows(x_ptr, n + 2, c, N, C, 0.0), load_rows(x_ptr, n + 3, c, N, C, 0.0)
    if sums_ptr is not None:
        tl.store(sums_ptr + tile_n.to(tl.int64) * C + c, tl.sum((x0 + x1) + (x2 + x3), 0), c < C)
    if maxima_ptr is None:
        scale = tl.div_rn(1.0, tl.load(unit_ptr))
    else:
        scale = weight_scale(tl.max(tl.load(maxima_ptr + tl.arange(0, MAXIMA)), 0))
        if tl.program_id(0) == 0:
            tl.store(unit_ptr, tl.div_rn(1.0, scale))
    x0, x1, x2, x3 = scaled(x0, scale), scaled(x1, scale), scaled(x2, scale), scaled(x3, scale)
    store_rows(x0, x1, x2, x3, rows_ptr, quads, c, N, C)
    if columns_ptr is not None:
        store_columns(x0, x1, x2, x3, columns_ptr, quads, c, N, C)


def default_launch(rows: int = 128) -> dict:
    """Return the default launch parameters: 128 rows of a column are 128 bytes, a full cache line."""
    return dict(zip(NAMES, (rows, 64, 8, 4), strict=True))


def candidates() -> list[dict]:
    """Return the launch parameters that scripts/tune.py tries."""
    choices = [(128, 64, 1, 4), (128, 64, 64, 4), (128, 64, 8, 4), (128, 64, 8, 8), (64, 64, 8, 4), (64, 128, 8, 4)]
    choices += [(128, 128, 8, 8), (256, 64, 8, 8), (128, 32, 8, 4), (256, 32, 8, 4)]
    return [dict(zip(NAMES, choice, strict=True)) for choice in choices]


def choose_tile_launch(kernel: str, x: Tensor, rows: int = 128) -> tuple[int, int, dict]:
    """Return how many tiles x (N, C) has along N and in all, and the launch parameters of a kernel on such tiles.

    `rows` are the rows of a tile, if the tables name no other.
    """
    N, C = x.shape
    launch = launch_parameters(kernel, f"{C} {x.dtype}", default_launch(rows), x.device)
    tiles_n = triton.cdiv(N, launch["BLOCK_N"])
    return tiles_n, tiles_n * triton.cdiv(C, launch["BLOCK_C"]), launch


def unit_tensor(scale: float, device: torch.device) -> Tensor:
    """Return 1 / scale, a scalar in fp32 on the device. Do not write to it: later calls return the same tensor.

    Filling a new tensor takes 2 us, and a step of 1558M asks for it 600 times.
    """
    if is_observed():  # in FakeTensorMode, the tensor must be fake
        return torch.full((), 1 / scale, dtype=torch.float32, device=device)
    if (scale, device) not in _units:
        unit = torch.full((), 1 / scale, dtype=torch.float32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # only a replay of the graph fills it
            return unit
        _units[scale, device] = unit
    return _units[scale, device]


def dy_scale(N: int) -> float:
    """Return the scale of a gradient of N rows: gradient_scale() of kernels/fp8.py for a number on the host."""
    return DY_SCALE * triton.next_power_of_2(max(1, N))


def empty_fp8(N: int, C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor (N, C rounded up to a multiple of 16). For a matrix by columns, pass (C, N)."""
    return torch.empty(N, triton.cdiv(C, MULTIPLE.value) * MULTIPLE.value, dtype=dtype, device=device)


def quantize(
    x: Tensor,
    unit: Tensor,
    dtype: torch.dtype = E4M3,
    columns: bool = True,
    sums: bool = False,
    maxima: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (N, C), contiguous, in fp8 by rows and by columns, and the sum of its rows (C,) in x's dtype.

    `unit` is 1 / scale, a scalar in fp32 on the device. `maxima` are the largest absolute values of a weight's parts,
    in fp32. If they are given, the kernel writes `unit`. Without `columns` or `sums`, that output is empty.
    """
    N, C = x.shape
    tiles_n, programs, launch = choose_tile_launch("quantize", x)
    by_rows, by_columns = empty_layouts(x, columns, dtype)
    partial = torch.empty(tiles_n, C, dtype=torch.float32, device=x.device) if sums else None
    _quantize_kernel[(programs,)](
        x_ptr=x,
        maxima_ptr=maxima,
        unit_ptr=unit,
        rows_ptr=by_rows,
        columns_ptr=by_columns if columns else None,
        sums_ptr=partial,
        N=N,
        C=C,
        MAXIMA=1 if maxima is None else len(maxima),
        **launch,
    )
    return by_rows, by_columns, add_partial_sums(partial, x.dtype) if sums else x.new_empty(0)


def launch_round_input(x: Tensor, columns: bool) -> tuple[Tensor, Tensor]:
    """Return x (N, C) in e4m3, times X_SCALE, by rows and by columns. Without `columns`, the second is empty."""
    return quantize(x, unit_tensor(X_SCALE, x.device), columns=columns)[:2]


def empty_layouts(x: Tensor, columns: bool = True, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Allocate x (N, C) in fp8 by rows and by columns. Without `columns`, the second is empty."""
    N, C = x.shape
    return empty_fp8(N, C, dtype, x.device), empty_fp8(C, N if columns else 0, dtype, x.device)


round_input = custom_op("hotswap::round_input", launch_round_input, empty_layouts)


def matrix_and_layouts(x: Tensor | InFp8, columns: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (..., C) as a contiguous (N, C) matrix, and in fp8 by rows and by columns. A norm may have rounded it.

    Without `columns`, the last is empty.
    """
    if isinstance(x, InFp8):
        return x.tensor.view(-1, x.shape[-1]), x.rows, x.columns
    x = x.reshape(-1, x.shape[-1]).contiguous()
    with torch.no_grad():  # the gradient goes to x itself
        return x, *round_input(x, columns)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in e4m3 by rows and by columns, and its unit: 1 / scale, a scalar in fp32."""
    parts = min(MAX_PROGRAMS, triton.next_power_of_2(triton.cdiv(weight.numel(), MAXIMA_LAUNCH["BLOCK"])))
    maxima = torch.empty(parts, dtype=torch.float32, device=weight.device)
    unit = torch.empty((), dtype=torch.float32, device=weight.device)
    _maxima_kernel[(parts,)](weight, maxima, weight.numel(), **MAXIMA_LAUNCH)
    rows, columns, _ = quantize(weight, unit, maxima=maxima)
    return rows, columns, unit
