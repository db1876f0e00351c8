"""Rung 14: round a matrix to fp8 once, and write it in two layouts.

fp8 has 8 bits: e4m3 keeps 3 bits of mantissa and reaches 448. Tensor cores multiply fp8 at up to twice the rate of
bf16, if both operands are contiguous along the dimension that is summed. y = x W^T sums over channels and reads x (N,
C) by rows. dW = dy^T x sums over tokens and reads x by columns. So the kernel writes x and its transpose (C, N). A
scale, here 4, moves x into the range of fp8. A power of two rounds nothing (Micikevicius 2022, arXiv:2209.05433).

An element moves 4 bytes: 2 of bf16, and 1 of each layout. The kernel is memory-bound, but only if no thread moves
single bytes. So a thread rounds four numbers to a word of 32 bits: four neighbours of a row, then four of a column.
Triton has no such operation, so ROUND is PTX, the assembly of NVIDIA's GPUs. N and C must be multiples of 16.

Exercise: each row has a scale of its own, 128 / p. p is the largest power of two that is at most m, the row's largest
|x|. Write `solution(x)`, which returns the rows in fp8, and p / 128 in fp32, (N, 1). m in fp32 without its mantissa is
p: (m.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True). Run `python course/14_fp8.py mine.py`.
"""

import torch
import triton
import triton.language as tl

ROUND = tl.constexpr("""{.reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};}""")  # $0 is the word, in 32 bits (=r), of $1 to $4, in fp32 (f). satfinite: at most 448


@triton.jit
def round_kernel(x_ptr, rows_ptr, words_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    quad = tl.program_id(1) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)  # quad q is the rows 4 q to 4 q + 3
    xs = ()
    for i in tl.static_range(4):  # the compiler unrolls this loop; xs gets row i of each quad
        n = 4 * quad + i
        at = n.to(tl.int64)[:, None] * C + c[None, :]
        mask = (n < N)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + at, mask).to(tl.float32) * 4.0
        rounded = tl.inline_asm_elementwise(ROUND, "=r,f,f,f,f", [x], tl.float8e4nv, is_pure=True, pack=4)
        tl.store(rows_ptr + at, rounded, mask)  # float8e4nv is e4m3. pack=4: $1 to $4 are neighbours in a row
        xs += (x,)
    # pack=1: $1 to $4 are from the four xs. is_pure=False: or Triton loads x again, into the threads of the last store
    words = tl.inline_asm_elementwise(ROUND, "=r,f,f,f,f", xs, tl.uint32, is_pure=False, pack=1)
    length = N // 16 * 4  # of a column in words. Triton sees that it is a multiple of 4, and stores 4 words at once
    at = c.to(tl.int64)[:, None] * length + quad[None, :]
    tl.store(words_ptr + at, tl.trans(words), (c < C)[:, None] & (quad < length)[None, :])


def round_to_fp8(x):  # a program's rows of 64 in bf16 and columns of 128 in fp8 fill cache lines of 128 bytes
    N, C = x.shape
    rows = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    words = torch.empty(C, N // 4, dtype=torch.int32, device=x.device)  # four numbers of a column each
    round_kernel[triton.cdiv(C, 64), triton.cdiv(N, 128)](x, rows, words, N, C, BLOCK_N=128, BLOCK_C=64)
    return rows, words.view(rows.dtype)


def inputs(shape, **options):
    return {"x": torch.randn(shape, **options)}


def reference(x):
    rows = (4 * x).clamp(-448, 448).to(torch.float8_e4m3fn)
    return rows, rows.T.contiguous()


def cost(shape, dtype):
    return {"forward": (shape[0] * shape[1], shape[0] * shape[1] * (dtype.itemsize + 2))}


def exercise(x):
    power = (x.abs().amax(1, keepdim=True).float().view(torch.int32) & 0x7F800000).view(torch.float32)
    return (x * (128 / power)).clamp(-448, 448).to(torch.float8_e4m3fn), power / 128


NEEDS = "fp8"
KERNELS = {"triton": round_to_fp8}
SHAPES = {"gpu": {"shape": (65536, 768)}}
if __name__ == "__main__":
    from climb import climb

    climb(__file__)
