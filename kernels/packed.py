"""q, k and v in one tensor and their gradients in one as well: a product makes the three, and none of them is copied.

Autograd concatenates the gradients of a split: 0.6 GB read and written a layer at B = 64, T = 1024, C = 768, for 0.65
ms where they are views. So an attention that can writes them into one buffer, which split() then hands on as it is.
Under torch.compile a plain split does: Inductor knows that its parts put together again are no operation.
"""

import torch
from torch import Tensor


def split(packed: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, ...]:
    """(B, T, sum of heads, D) -> views (B, T, heads[i], D)."""
    return packed.split(heads, dim=2) if torch.compiler.is_compiling() else Split.apply(packed, heads)


class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, heads):
        return packed.split(heads, dim=2)

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():  # a gradient of the gradient goes to all parts
            return torch.cat(gradients, 2), None
        first = gradients[0]
        memory, strides, end = first.untyped_storage()._cdata, first.stride(), first.storage_offset()
        for part in gradients:
            if (part.untyped_storage()._cdata, part.stride(), part.storage_offset()) != (memory, strides, end):
                return torch.cat(gradients, 2), None
            end += part.shape[2] * strides[2]
        B, T, _, D = first.shape
        return first.as_strided((B, T, sum(part.shape[2] for part in gradients), D), strides), None


def buffer(q: Tensor, k: Tensor) -> Tensor:
    """For dq, dk and dv side by side: (B, T, H + 2 Hkv, D), where T is the longer of Tq and Tk."""
    return q.new_empty(q.shape[0], max(q.shape[1], k.shape[1]), q.shape[2] + 2 * k.shape[2], q.shape[3])


def parted(grads: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of such a buffer dq, dk and dv, views."""
    dq, dk, dv = grads.split((q.shape[2], k.shape[2], k.shape[2]), dim=2)
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]
