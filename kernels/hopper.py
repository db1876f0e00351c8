"""Helpers for Gluon kernels on Hopper: TMA descriptors, and one name per function that Triton renamed after 3.6."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
GLUON_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
_descriptor = gl.shared_memory_descriptor
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret
ROUND_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
ROUND_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
# the first output must not share the input's register ("=&f"), because the second instruction still reads it
UNPACK_BF16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@gluon.jit
def exp2(x):
    """Return 2^x in one instruction, with subnormal numbers as 0. gl.exp2 scales those up and down."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def to_16_bits(x, dtype: gl.constexpr):
    """Return x.to(dtype). It rounds two numbers in one instruction (F2FP).

    Triton does so, too, unless the result is converted back to fp32. Then it rounds one number at a time (F2F), and two
    take 16 times as long.
    """
    if dtype == gl.bfloat16:
        out = gl.inline_asm_elementwise(ROUND_BF16, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        out = gl.inline_asm_elementwise(ROUND_FP16, "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2)
    return out


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
    parts = (tile,)
    for _ in gl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(parts)):
            part = parts[i]
            halves += part.reshape(part.shape[0], 2, part.shape[1] // 2).permute(0, 2, 1).split()
        parts = halves
    out = ()
    for i in gl.static_range(COUNT):
        out += (gl.convert_layout(parts[i], layout, assert_trivial=True),)
    return out


@gluon.jit
def start_barriers(STAGES: gl.constexpr):
    """Return full and empty of each slot, and turn of two consumers: see kernels/mlp/_gluon_kernel.py."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()  # TMA counts its bytes in these barriers
    barrier()
    return full, empty, turn


@gluon.jit
def multiply_in_turn(
    total, xs, ws, full, empty, turn, position, parity, steps, CONSUMER: gl.constexpr, W_BY_ROWS: gl.constexpr
):
    """Wait for this consumer's turn, and add the product of a tile to total: x W^T, or x W if W_BY_ROWS is False.

    kernels/mlp/_gluon_kernel.py explains the ring of slots and the turns. Return total, the last slot, and the slot and
    the phase after it. The last wgmma is still in flight, and its slot is not released.
    """
    STAGES: gl.constexpr = xs.shape[0]
    stage, phase, last = position % STAGES, position // STAGES & 1, 0
    # consumer 0 has the first turn: its first wait is for parity 1, and passes at once
    mbarrier.wait(turn.index(CONSUMER), parity ^ (1 - CONSUMER))
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        w_tile = ws.index(stage).permute((1, 0)) if W_BY_ROWS else ws.index(stage)
        total = warpgroup_mma(xs.index(stage), w_tile, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))  # one wgmma stays in flight; the wgmma of slot `last` is done
        mbarrier.arrive(empty.index(last), pred=step > 0)
        last = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return total, last, stage, phase


@functools.lru_cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of a tile in shared memory.

    It is cached, because it takes 5 us and attention's backward needs eight layouts.
    """
    gluon_dtype = GLUON_DTYPES.get(dtype) or getattr(gl, str(dtype).removeprefix("torch."))
    return gl.NVMMASharedLayout.get_default_for(list(block), gluon_dtype)


def align(tensor: Tensor) -> Tensor:
    """Return a (n, C) tensor as TMA needs it: contiguous, at a multiple of 16 bytes.

    is_contiguous() is not enough: it ignores the stride of a single row, and TMA does not.
    """
    if tensor.stride() == (tensor.shape[1], 1) and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def tma_descriptor(tensor: Tensor | None, *block: int) -> TensorDescriptor | None:
    """Return a TMA descriptor of `tensor` for tiles of shape `block`, or None if `tensor` is None."""
    if tensor is None:
        return None
    layout = _layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)


def head_tiles(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor for tiles (rows, D) of one head of a (B, T, H, D) tensor."""
    return tma_descriptor(tensor.transpose(1, 2), 1, 1, rows, tensor.shape[-1])
