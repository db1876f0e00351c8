"""FlexAttention (Dong et al. 2024, arXiv:2412.05496): PyTorch writes a Triton kernel in tiles around a given mask.

Blocks of 128 x 128 scores that the mask leaves empty are not computed, and only those that it cuts are masked: a causal
mask spares half the blocks, a window or documents nearly all. Which blocks those are follows from where each query's
keys begin and end, without the (Tq, Tk) mask of create_block_mask: 268 MB at T = 16,384, and here tables of
(T / 128, T / 128). They are kept for lengths that were there before; with `lengths` or `starts` they are made in the
compiled code, and in that of a model's training step once for all its layers.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # PyTorch's own choice
RUNS = "flex_attention", "flex_attention_backward"


def unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "PyTorch's FlexAttention has no backward on a CPU: it needs an NVIDIA GPU, or choose attn=sdpa"
    return None


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None):
    shape = (q.shape[1], k.shape[1], q.device, causal, window)
    if torch.compiler.is_compiling():
        return flex(q, k, v, scale, block_mask(*shape, lengths, starts))
    if lengths is None and starts is None:
        return compiled(flex)(q, k, v, scale, kept(*shape))
    # Of documents with a window PyTorch 2.11 cannot compile tables of any length (CantSplit): a version for each
    masked = compiled(attention, dynamic=None if starts is None else False)
    return masked(q, k, v, causal=causal, scale=scale, lengths=lengths, window=window, starts=starts)


@functools.cache
def compiled(function: Callable, dynamic: bool | None = None) -> Callable:
    """torch.compile keeps 8 versions of a function, and these have one for each dtype, limit and kind of length."""
    limits = torch._dynamo.config.patch(recompile_limit=512, accumulated_recompile_limit=4096)
    return limits(torch.compile(function, fullgraph=True, dynamic=dynamic))


def flex(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: BlockMask) -> Tensor:
    group, kernel = q.shape[2] // k.shape[2], "AUTO"
    if group * q.shape[1] > BLOCK:  # PyTorch 2.11's kernel for decoding puts them in one block, and then finds none
        kernel = "TRITON"
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
    """What the contract's limits leave, as FlexAttention takes it.

    A query sees the keys from `first` to `last`, and neither falls from a query to the next. So of a block's queries
    the first one's `first` and the last one's `last` say whether it is empty, and the other two whether it is whole.
    """
    offset = 0 if keys == queries else keys - queries  # a constant, for which the kernel of any length will do

    def span(b, q):
        if lengths is None:
            last = q + offset if causal else keys - 1
        else:
            last = q + lengths[b] - queries if causal else lengths[b] - 1
        first = 0 if window is None else last - window + 1
        if starts is not None:
            first = starts[b, q] if window is None else torch.maximum(first, starts[b, q])
        return first, last

    def sees(b, h, q, k):
        first, last = span(b, q)
        return (k >= first) & (k <= last)

    rows = next((len(t) for t in (lengths, starts) if t is not None), 1)
    b = torch.arange(rows, device=device).view(-1, 1, 1, 1)  # of (b, head, query, key)
    q = torch.arange(0, queries, BLOCK, device=device).view(-1, 1)
    k = torch.arange(0, keys, BLOCK, device=device)
    lowest, last = span(b, q)
    first, highest = span(b, (q + BLOCK - 1).clamp(max=queries - 1))
    some = (k + BLOCK > lowest) & (k <= highest)
    whole = (k >= first) & (k + BLOCK - 1 <= last) & (q + BLOCK <= queries)
    size = rows, 1, len(q), len(k)
    cut, whole = ordered((some & ~whole).expand(size)), ordered(whole.expand(size))
    return BlockMask.from_kv_blocks(*cut, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys))


def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(..., N) bool -> in each row how many are true (...), and their places (..., N) before all others; int32."""
    places = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), places.to(torch.int32)


kept = functools.lru_cache(maxsize=64)(block_mask)
