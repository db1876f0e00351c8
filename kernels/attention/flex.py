"""FlexAttention (Dong et al. 2024, arXiv:2412.05496): PyTorch generates a tiled Triton kernel around a given mask.

The kernel skips each block of 128 x 128 scores that the mask leaves empty, and applies the mask only in blocks that are
partly visible. A causal mask skips half of the blocks; a window or documents skip nearly all.

PyTorch's create_block_mask derives the blocks to skip from the whole (Tq, Tk) mask, which takes 268 MB at T = 16,384.
This file derives them from the first and the last key that each query sees, so it needs only (T / 128, T / 128) tables.
It caches the tables by shape. If `lengths` or `starts` are given, the compiled code computes the tables; a model's
compiled training step computes them once for all layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kernels.compat import allow_graphs, fake_mode
from kernels.direct import custom_op

BLOCK = 128  # PyTorch's default
RUNS = "flex_attention", "flex_attention_backward"


def unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "PyTorch's FlexAttention has no backward on a CPU: it needs an NVIDIA GPU, or choose attn=sdpa"
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    if q.stride(-1) != 1:  # PyTorch 2.11's kernel then gives wrong numbers in bf16: off by 0.7 of the largest
        q = q.contiguous()
    shape = (q.shape[1], k.shape[1], q.device, causal, window)
    if torch.compiler.is_compiling():
        return attention_in_blocks(q, k, v, scale, block_mask(*shape, lengths, starts))
    if lengths is None and starts is None:
        make_mask = block_mask if fake_mode() else cached_block_mask  # a fake mask serves only its FakeTensorMode
        return compiled_version(attention_in_blocks)(q, k, v, scale, make_mask(*shape))
    # PyTorch 2.11 cannot compile documents with a window for dynamic lengths (CantSplit), so compile each length
    compiled_attention = compiled_version(attention, dynamic=None if starts is None else False)
    return compiled_attention(q, k, v, causal=causal, scale=scale, lengths=lengths, window=window, starts=starts)


@functools.cache
def compiled_version(function: Callable, dynamic: bool | None = None) -> Callable:
    """Return torch.compile(function) with a higher limit on recompiles.

    By default torch.compile keeps at most 8 versions of a function. The functions of this file need one version for
    each combination of dtype, limits and kind of length.
    """
    return allow_graphs(512)(torch.compile(function, fullgraph=True, dynamic=dynamic))


def attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: BlockMask) -> Tensor:
    """Compute attention with PyTorch's flex_attention in the blocks of `mask`."""
    group = q.shape[2] // k.shape[2]
    # With "AUTO" PyTorch 2.11 may choose its decoding kernel. That kernel puts all queries that share a key head in one
    # block, and if they do not fit, PyTorch finds no kernel
    kernel = "TRITON" if group * q.shape[1] > BLOCK else "AUTO"
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    options = {"enable_gqa": group > 1, "kernel_options": {"BACKEND": kernel}}
    return flex_attention(q, k, v, block_mask=mask, scale=scale, **options).transpose(1, 2)


def block_mask(
    queries: int,
    keys: int,
    device: torch.device,
    causal: bool,
    window: int | None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> BlockMask:
    """Return the mask of the contract's causal, window, lengths and starts as FlexAttention's BlockMask.

    A query sees the keys from `first` to `last`. Neither of them decreases from one query to the next. So every query
    of a block sees at least the keys from the last query's `first` to the first query's `last`, and at most the keys
    from the first query's `first` to the last query's `last`.
    """
    offset = 0 if keys == queries else keys - queries  # the constant 0 lets one compiled kernel serve all lengths

    def visible_range(b: Tensor, q: Tensor) -> tuple:
        if lengths is None:
            last = q + offset if causal else keys - 1
        else:
            last = q + lengths[b] - queries if causal else lengths[b] - 1
        first = 0 if window is None else last - window + 1
        if starts is not None:
            first = starts[b, q] if window is None else torch.maximum(first, starts[b, q])
        return first, last

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first, last = visible_range(b, q)
        return (k >= first) & (k <= last)

    batch = 1  # without lengths and starts, the mask is equal for all sequences
    if lengths is not None:
        batch = len(lengths)
    elif starts is not None:
        batch = len(starts)
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)  # the axes are (b, head, query block, key block)
    q = torch.arange(0, queries, BLOCK, device=device).view(-1, 1)  # first query of each block
    k = torch.arange(0, keys, BLOCK, device=device)  # first key of each block
    lowest_first, lowest_last = visible_range(b, q)
    highest_first, highest_last = visible_range(b, (q + BLOCK - 1).clamp(max=queries - 1))
    nonempty = (k + BLOCK > lowest_first) & (k <= highest_last)
    full = (k >= highest_first) & (k + BLOCK - 1 <= lowest_last) & (q + BLOCK <= queries)
    size = batch, 1, len(q), len(k)
    partial_counts, partial_indices = list_blocks((nonempty & ~full).expand(size))
    full_counts, full_indices = list_blocks(full.expand(size))
    return BlockMask.from_kv_blocks(
        kv_num_blocks=partial_counts,
        kv_indices=partial_indices,
        full_kv_num_blocks=full_counts,
        full_kv_indices=full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(queries, keys),
    )


def list_blocks(selected: Tensor) -> tuple[Tensor, Tensor]:
    """Map `selected` (..., N) bool to counts (...) and indices (..., N), both int32: the selected blocks come first."""
    indices = selected.byte().argsort(dim=-1, descending=True, stable=True)
    return selected.sum(-1, dtype=torch.int32).contiguous(), indices.to(torch.int32).contiguous()


def empty_lists(selected: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the results of list_blocks()."""
    counts, indices = (selected.new_empty(size, dtype=torch.int32) for size in (selected.shape[:-1], selected.shape))
    return counts, indices


# An operator, so that Inductor keeps the strides. In a graph without gradients PyTorch 2.11 may give counts (2, 1, 1)
# the strides (1, 2, 2). Its kernel multiplies by the second of them, and reads beyond the counts
list_blocks = custom_op("hotswap::list_blocks", list_blocks, empty_lists)


@functools.cache  # without a limit: a captured CUDA graph reads its mask in every replay, so no mask may be freed
def cached_block_mask(*shape: Any) -> BlockMask:
    """Return block_mask(*shape), the same one for equal arguments. It takes 17 KB at T = 4096, and 4 MB at T = 65,536.

    A mask that is first used in inference must not be an inference tensor, because autograd could not save it later.
    """
    with torch.inference_mode(False):
        return block_mask(*shape)
