"""Rung 13: round a matrix to fp8 once, and write it in two layouts.

fp8 has 8 bits: e4m3 keeps 3 bits of mantissa and reaches 448. A tensor core multiplies fp8 at up to twice the rate of
bf16, but it needs both operands contiguous along the dimension that is summed. A linear layer sums along different
dimensions: y = x W^T sums over channels and reads x by rows, and dW = dy^T x sums over tokens and reads x by columns.
So it needs x (N, C) and its transpose (C, N). PyTorch multiplies these layouts with

    y  = torch._scaled_mm(x_rows, w_rows.T, x_unit, w_unit, out_dtype=torch.bfloat16)
    dW = torch._scaled_mm(dy_columns, x_columns.T, dy_unit, x_unit, out_dtype=torch.bfloat16)

A scale moves the numbers into the range of fp8, and a unit is 1 / scale. Here the scale is 4, a power of two, so the
multiplication rounds nothing. Micikevicius et al. 2022, arXiv:2209.05433, describe fp8 and its scales.

The kernel reads each element of x once. An element moves 4 bytes: 2 of bf16, and 1 of each layout. The kernel is
memory-bound, but only if a thread never moves single bytes. So a thread rounds four numbers to a word of 32 bits: four
neighbours of a row for the first layout, four neighbours of a column for the second. Triton has no such operation, so
it is four instructions of PTX, the assembly of NVIDIA's GPUs. Triton's interpreter has no PTX, so this rung needs a
GPU. N and C must be multiples of 16, as the tensor cores demand.

Exercise: one scale for each row. Return the rows in fp8 and the unit of each row, as in `exercise`. (A transpose cannot
have such scales: dW sums over the rows, so the scale of a row cannot leave the sum.) The difficulty is that a program
needs the largest element of a row before it rounds the first one. The largest power of two in a number is the number
without its mantissa: (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True).

    python course/13_fp8.py mine.py
"""

import torch
import triton
import triton.language as tl

SCALE = tl.constexpr(4.0)
ROUND = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")  # "satfinite": a number beyond 448 becomes 448


@triton.jit
def store_rows(x_ptr, rows_ptr, n, c, N, C):
    """Round the elements (n, c) and store them by rows. Return them in fp32."""
    at = n.to(tl.int64)[:, None] * C + c[None, :]
    mask = (n < N)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + at, mask).to(tl.float32) * SCALE
    # pack=4: the operands $1 to $4 are four neighbours of a row, and $0 has their four bytes
    rounded = tl.inline_asm_elementwise(ROUND, "=r,f,f,f,f", [x], tl.float8e4nv, is_pure=True, pack=4)
    tl.store(rows_ptr + at, rounded, mask)
    return x


@triton.jit
def round_kernel(x_ptr, rows_ptr, columns_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    quad = tl.program_id(1) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)  # numbers of groups of four rows
    x0 = store_rows(x_ptr, rows_ptr, 4 * quad, c, N, C)
    x1 = store_rows(x_ptr, rows_ptr, 4 * quad + 1, c, N, C)
    x2 = store_rows(x_ptr, rows_ptr, 4 * quad + 2, c, N, C)
    x3 = store_rows(x_ptr, rows_ptr, 4 * quad + 3, c, N, C)
    # $1 to $4 are one element of x0, x1, x2 and x3. "Impure", or Triton computes x0 to x3 again for this layout
    words = tl.inline_asm_elementwise(ROUND, "=r,f,f,f,f", [x0, x1, x2, x3], tl.uint32, is_pure=False, pack=1)
    length = N // 16 * 4  # of a column in words, which Triton then knows to be a multiple of 4: it stores 16 bytes
    at = c.to(tl.int64)[:, None] * length + quad[None, :]
    mask = (c < C)[:, None] & (quad < length)[None, :]
    tl.store(columns_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + at, tl.trans(words), mask)


def round_to_fp8(x):
    N, C = x.shape
    rows = torch.empty(N, C, dtype=torch.float8_e4m3fn, device=x.device)
    columns = torch.empty(C, N, dtype=torch.float8_e4m3fn, device=x.device)
    grid = triton.cdiv(C, 64), triton.cdiv(N, 128)  # 128 bytes of a row of x, and of a column: whole cache lines
    round_kernel[grid](x, rows, columns, N, C, BLOCK_N=128, BLOCK_C=64)
    return rows, columns


KERNELS = {"triton": round_to_fp8}
SHAPES = {"gpu": {"shape": (65536, 768)}}


def unavailable(device):
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return None if has_fp8 else "it needs an NVIDIA GPU with fp8, of compute capability 8.9 or newer"


def inputs(shape, dtype, device):
    return {"x": torch.randn(shape, device=device).to(dtype)}


def in_fp8(x):
    rounded = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    return rounded.double() if x.dtype == torch.float64 else rounded  # climb.py calculates with exact results


def reference(x):
    rows = in_fp8(x * SCALE.value)
    return rows, rows.T.contiguous()


def cost(shape, dtype):
    n = shape[0] * shape[1]
    return {"forward": (n, n * (dtype.itemsize + 2))}


def exercise(x):
    largest = x.abs().amax(1, keepdim=True).float().clamp(min=2**-60)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # the largest power of two in it
    return in_fp8(x * (128 / power)), power / 128


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
