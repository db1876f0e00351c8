"""Round a matrix to fp8 in one pass, and write it twice: row by row, and column by column.

A tensor core needs both operands of an fp8 product contiguous along the dimension that is summed. The three products of
a linear layer sum along different dimensions, so each operand is needed in two layouts:

    y  = x W^T     x by rows, W by rows
    dx = dy W      dy by rows, W by columns
    dW = dy^T x    dy by columns, x by columns

By rows is the matrix (N, C); by columns is its transpose (C, N), contiguous. A separate transpose would read and write
the tensor again. The kernel below holds a tile in registers, and stores it and its transpose. It also sums the rows of
the tile, because the sum of dy's rows is the gradient of the bias. As in kernels/fp8.py, infinities become NaN, and
other numbers beyond the range become the largest one.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8 import DY_SCALE, E4M3
from kernels.tuned import launch_parameters

MULTIPLE = tl.constexpr(16)  # a row of an operand must be a multiple of 16 bytes
NAMES = "BLOCK_N", "BLOCK_C", "num_warps"
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ROUND = """{
    .reg .b16 low, high;
    cvt.rn.satfinite.%sx2.f32 low, $2, $1;
    cvt.rn.satfinite.%sx2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}"""
ROUND_E4M3, ROUND_E5M2 = (tl.constexpr(ROUND % (name, name)) for name in ("e4m3", "e5m2"))


@triton.jit
def to_fp8(x, scale, dtype: tl.constexpr):
    """Return x times scale, in fp8, for x in fp32.

    Triton converts two numbers to half a word, and a transpose takes single bytes from the half. ptxas 12.9 and older
    may read the half before it is written (triton-lang/triton issue 11111). The assembly below makes a whole word of
    four numbers.
    """
    scaled = tl.where(tl.abs(x) < float("inf"), x * scale, float("nan"))
    if INTERPRETED:  # the interpreter runs no assembly, and its conversion does not saturate
        LARGEST: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
        tile = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    elif dtype == tl.float8e4nv:
        tile = tl.inline_asm_elementwise(ROUND_E4M3, "=r,f,f,f,f", [scaled], tl.float8e4nv, is_pure=True, pack=4)
    else:
        tile = tl.inline_asm_elementwise(ROUND_E5M2, "=r,f,f,f,f", [scaled], tl.float8e5, is_pure=True, pack=4)
    return tile


@triton.jit
def store_rows(tile, rows_ptr, n, c, N, C):
    """Store a tile of an (N, C) matrix row by row. Rows end with zeros up to a multiple of 16."""
    width = tl.cdiv(C, MULTIPLE) * MULTIPLE
    tl.store(rows_ptr + n.to(tl.int64)[:, None] * width + c[None, :], tile, (n < N)[:, None] & (c < width)[None, :])


@triton.jit
def store_columns(tile, columns_ptr, n, c, N, C):
    """Store a tile of an (N, C) matrix column by column. Columns end with zeros up to a multiple of 16."""
    height = tl.cdiv(N, MULTIPLE) * MULTIPLE
    offsets = c.to(tl.int64)[:, None] * height + n[None, :]
    tl.store(columns_ptr + offsets, tl.trans(tile), (c < C)[:, None] & (n < height)[None, :])


@triton.jit
def weight_scale(largest):
    """Return the largest power of two at which `largest` fits in e4m3, by the rule of kernels/fp8.py."""
    ratio = tl.div_rn(448.0, tl.maximum(largest, 2.0**-60))  # plain division may be off by a bit
    exponent = ratio.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(largest < float("inf"), exponent.to(tl.float32, bitcast=True), float("nan"))


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _quantize_kernel(
    x_ptr,  # (N, C)
    largest_ptr,  # the largest absolute value of a weight, fp32; None for other tensors
    unit_ptr,  # 1 / scale, fp32; written for a weight, and read otherwise
    rows_ptr,  # (N, C rounded up to a multiple of 16) in fp8
    columns_ptr,  # (C, N rounded up to a multiple of 16) in fp8
    sums_ptr,  # (tiles along N, C) fp32, the sums of x's rows in each tile; or None
    N,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (n < N)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + n.to(tl.int64)[:, None] * C + c[None, :], mask, other=0.0).to(tl.float32)
    if largest_ptr is None:
        scale = tl.div_rn(1.0, tl.load(unit_ptr))
    else:
        scale = weight_scale(tl.load(largest_ptr))
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(unit_ptr, tl.div_rn(1.0, scale))
    tile = to_fp8(x, scale, rows_ptr.dtype.element_ty)
    store_rows(tile, rows_ptr, n, c, N, C)
    store_columns(tile, columns_ptr, n, c, N, C)
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(x, 0), c < C)


@triton.jit
def _largest_kernel(x_ptr, largest_ptr, size, BLOCK: tl.constexpr):
    """Set `largest`, the bits of an fp32 number, to max(largest, |x|). NaN has the largest bits."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.abs(tl.load(x_ptr + i, i < size, other=0.0).to(tl.float32))
    bits = tl.max(x.to(tl.int32, bitcast=True), 0)  # the bits of numbers >= 0 are in the order of the numbers
    tl.atomic_max(largest_ptr, bits)


def default_launch() -> dict:
    """Return the default launch parameters: 128 rows of a column are 128 bytes, a full cache line."""
    return dict(zip(NAMES, (128, 64, 8), strict=True))


def candidates() -> list[dict]:
    """Return the launch parameters that scripts/tune.py tries."""
    choices = (128, 64, 4), (64, 64, 4), (128, 128, 8), (64, 128, 8), (128, 32, 4), (256, 64, 8)
    return [dict(zip(NAMES, choice, strict=True)) for choice in choices]


def tiles(kernel: str, x: Tensor) -> tuple[tuple[int, int], dict]:
    """Return the grid and the launch parameters of a kernel in which each program holds a tile of x (N, C)."""
    N, C = x.shape
    launch = launch_parameters(kernel, f"{C} {x.dtype}", default_launch(), x.device)
    return (triton.cdiv(N, launch["BLOCK_N"]), triton.cdiv(C, launch["BLOCK_C"])), launch


def unit_of(scale: float, device: torch.device) -> Tensor:
    """Return 1 / scale, a scalar in fp32 on the device."""
    return torch.full((), 1 / scale, dtype=torch.float32, device=device)


def dy_unit(N: int, device: torch.device) -> Tensor:
    """Return 1 / the scale of a gradient of N rows, by the rule of kernels/fp8.py."""
    return unit_of(DY_SCALE * triton.next_power_of_2(max(1, N)), device)


def empty_fp8(N: int, C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor (N, C rounded up to a multiple of 16). For a matrix by columns, pass (C, N)."""
    return torch.empty(N, triton.cdiv(C, MULTIPLE.value) * MULTIPLE.value, dtype=dtype, device=device)


def quantize(
    x: Tensor, unit: Tensor, dtype: torch.dtype = E4M3, sums: bool = False, largest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (N, C), contiguous, in fp8 by rows and by columns, and the sum of its rows (C,) in x's dtype.

    `unit` is 1 / scale, a scalar in fp32 on the device. `largest` is a weight's largest absolute value, a scalar in
    fp32. If it is given, the kernel writes `unit`. Without `sums`, the returned sum is empty.
    """
    (N, C), (grid, launch) = x.shape, tiles("quantize", x)
    rows, columns = (empty_fp8(*size, dtype, x.device) for size in ((N, C), (C, N)))
    partial = torch.empty(grid[0], C, dtype=torch.float32, device=x.device) if sums else None
    _quantize_kernel[grid](x, largest, unit, rows, columns, partial, N, C, **launch)
    return rows, columns, partial.sum(0).to(x.dtype) if sums else x.new_empty(0)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in e4m3 by rows and by columns, and its unit: 1 / scale, a scalar in fp32."""
    largest = torch.zeros((), dtype=torch.int32, device=weight.device)
    _largest_kernel[(triton.cdiv(weight.numel(), 4096),)](weight, largest, weight.numel(), BLOCK=4096)
    unit = torch.empty((), dtype=torch.float32, device=weight.device)
    rows, columns, _ = quantize(weight, unit, largest=largest.view(torch.float32))
    return rows, columns, unit
