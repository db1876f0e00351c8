"""Elementwise work of Gluon kernels in fewer instructions than Triton would take."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels import matmul

# the first output must not share the input's register ("=&f"), because the second instruction still reads it
UNPACK_BF16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@gluon.jit
def exp2(x):
    """Return 2^x in one instruction, with subnormal numbers as 0. gl.exp2 scales those up and down."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def to_fp32(x):
    """Return x.to(gl.float32). In bf16 it takes one instruction a number, where Triton takes 1.5."""
    if x.dtype == gl.bfloat16:
        out = gl.inline_asm_elementwise(UNPACK_BF16, "=&f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        out = x.to(gl.float32)
    return out


@gluon.jit
def split_columns(tile, COUNT: gl.constexpr, layout: gl.constexpr):
    """Split a tile's columns into COUNT parts, each in the layout of a wgmma of its size. No data moves."""
    parts = matmul.split_columns(tile, COUNT)
    out = ()
    for i in gl.static_range(COUNT):
        out += (gl.convert_layout(parts[i], layout, assert_trivial=True),)
    return out
