"""q, k and v as views of one tensor, and their gradients as views of one tensor too, so that nothing is copied.

One matmul computes q, k and v. The backward of PyTorch's own split would concatenate their gradients. At B = 64,
T = 1024, C = 768 the concatenation reads and writes 0.6 GB a layer and takes 0.65 ms. So an attention backend may write
its three gradients into one buffer (gradient_buffer), and the backward of split() returns that buffer without a copy.
Under torch.compile split() is PyTorch's own split, because Inductor already removes a concatenation of the parts of a
split.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.compat import storage_id


def split(packed: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Split `packed` (B, T, sum(heads), D) into views (B, T, heads[i], D)."""
    return packed.split(heads, dim=2) if torch.compiler.is_compiling() else Split.apply(packed, heads)


class Split(torch.autograd.Function):
    """packed.split(heads, dim=2), with a backward that copies nothing if the gradients are side by side in memory."""

    @staticmethod
    def forward(ctx: FunctionCtx, packed: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, ...]:
        return packed.split(heads, dim=2)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # create_graph=True: a second derivative needs the concatenation
            return torch.cat(gradients, 2), None
        first = gradients[0]
        storage, strides, offset = storage_id(first.untyped_storage()), first.stride(), first.storage_offset()
        for part in gradients:
            if (storage_id(part.untyped_storage()), part.stride(), part.storage_offset()) != (storage, strides, offset):
                return torch.cat(gradients, 2), None  # the gradients are not side by side in one buffer
            offset += part.shape[2] * strides[2]
        B, T, _, D = first.shape
        heads = sum(part.shape[2] for part in gradients)
        return first.as_strided((B, T, heads, D), strides), None


def align_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` (B, T, H, D), or a contiguous copy if its rows do not begin at multiples of 16 bytes.

    The kernels of PyTorch and FlashAttention load 16 bytes at once. At another address, cuDNN and PyTorch's
    FlashAttention end with "misaligned address", after which the process can use the GPU no more.
    """
    distances = tensor.storage_offset(), *tensor.stride()[:-1]
    if tensor.stride(-1) == 1 and all(distance * tensor.element_size() % 16 == 0 for distance in distances):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def gradient_buffer(q: Tensor, k: Tensor) -> Tensor:
    """Allocate a (B, T, H + 2 Hkv, D) tensor for dq, dk and dv side by side, where T is the longer of Tq and Tk.

    q is (B, Tq, H, D) and k is (B, Tk, Hkv, D).
    """
    return q.new_empty(q.shape[0], max(q.shape[1], k.shape[1]), q.shape[2] + 2 * k.shape[2], q.shape[3])


def gradient_views(buffer: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the views dq, dk and dv of a gradient_buffer(), in the shapes of q, k and v."""
    dq, dk, dv = buffer.split((q.shape[2], k.shape[2], k.shape[2]), dim=2)
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]
