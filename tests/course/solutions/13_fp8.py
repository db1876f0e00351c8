"""A program holds whole rows in registers, so it can reduce a row before it rounds it."""

import torch
import triton
import triton.language as tl

ROUND = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@triton.jit
def kernel(x_ptr, rows_ptr, units_ptr, N, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    at = n.to(tl.int64)[:, None] * C + c[None, :]
    mask = (n < N)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 1), 2.0**-60)  # a row of zeros has a scale, too
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scaled = x * tl.div_rn(128.0, power)[:, None]
    rounded = tl.inline_asm_elementwise(ROUND, "=r,f,f,f,f", [scaled], tl.float8e4nv, is_pure=True, pack=4)
    tl.store(rows_ptr + at, rounded, mask)
    tl.store(units_ptr + n, power / 128.0, n < N)


def solution(x):
    N, C = x.shape
    rows = torch.empty(N, C, dtype=torch.float8_e4m3fn, device=x.device)
    units = torch.empty(N, 1, dtype=torch.float32, device=x.device)
    kernel[(triton.cdiv(N, 4),)](x, rows, units, N, C, ROWS=4, BLOCK=triton.next_power_of_2(C))
    return rows, units
