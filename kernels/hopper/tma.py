"""TMA for Gluon kernels: descriptors of tensors, and one name for each function that Triton renamed after 3.6."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
GLUON_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
_descriptor = gl.shared_memory_descriptor
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret


@gluon.jit
def allocate_tiles(descriptor, COUNT: gl.constexpr):
    """Return shared memory for COUNT tiles of a descriptor."""
    return gl.allocate_shared_memory(descriptor.dtype, [COUNT] + descriptor.block_type.shape, descriptor.layout)  # noqa: RUF005


@gluon.jit
def fence_and_sync():
    """Make this warpgroup's writes to shared memory, barriers included, visible to TMA."""
    fence_async_shared()
    thread_barrier()  # every thread has passed its fence before one thread starts a copy


@functools.lru_cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of a tile in shared memory. It takes 5 us, and attention's backward needs eight of them."""
    gluon_dtype = GLUON_DTYPES.get(dtype) or getattr(gl, str(dtype).removeprefix("torch."))
    return gl.NVMMASharedLayout.get_default_for(list(block), gluon_dtype)


def tma_descriptor(tensor: Tensor | None, *block: int) -> TensorDescriptor | None:
    """Return a TMA descriptor of `tensor` for tiles of shape `block`, or None if `tensor` is None."""
    if tensor is None:
        return None
    layout = _layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)


def head_tiles(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor for tiles (rows, D) of one head of a (B, T, H, D) tensor."""
    return tma_descriptor(tensor.transpose(1, 2), 1, 1, rows, tensor.shape[-1])
