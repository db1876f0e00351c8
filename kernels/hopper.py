"""Tiles on Hopper in Gluon: what TMA is told of a tensor, and words that later versions of Triton than 3.6 renamed."""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret


@functools.lru_cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of such a tile in shared memory. Kept: it takes 5 us, and an attention's backward has eight."""
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).removeprefix("torch.")))


def described(tensor: Tensor | None, *block: int) -> TensorDescriptor | None:
    """A tensor whose tiles of this shape TMA is to move."""
    if tensor is None:
        return None
    layout = _layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)
