"""Split each sequence over the ranks: DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509).

Each of n ranks holds all weights and T/n consecutive tokens of each sequence. Norm, linear layers, MLP and loss need no
other tokens. Attention needs all tokens, but its heads are independent. So the ranks exchange tokens for heads before
attention, and heads for tokens after it:

    q, k, v (B, T/n, H, D) -> (B, T, H/n, D) -> attention -> out (B, T, H/n, D) -> (B, T/n, H, D)

Every backend of attention computes this, with a window and documents too, because it sees whole sequences.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from data.loader import IGNORED
from model.gpt import GPT
from runtime.ranks import Ranks


def split_sequences(model: GPT, ranks: Ranks) -> None:
    """Let model(idx, targets, starts) compute this rank's part of the sequences, and return the loss of all parts.

    All ranks call it with the same whole sequences. With a cache (generation), model.forward() splits nothing.
    """
    model.part = ranks.rank
    for block in model.h:
        block.attn.attention = attention_over_ranks(block.attn.attention, ranks)
    model.register_forward_pre_hook(functools.partial(take_part, ranks))
    model.register_forward_hook(functools.partial(average_loss, ranks))


def attention_over_ranks(attention: Callable, ranks: Ranks) -> Callable:
    """Return a function that computes `attention` of tokens and heads that are split over the ranks."""

    @functools.wraps(attention)
    def call(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        q, k, v = (exchange(x, split=2, gather=1, ranks=ranks) for x in (q, k, v))  # (B, T, H/n, D) each
        return exchange(attention(q, k, v, **options), split=1, gather=2, ranks=ranks)  # (B, T/n, H, D)

    return call


def exchange(x: Tensor, split: int, gather: int, ranks: Ranks) -> Tensor:
    """Split dimension `split` of x (B, T, H, D) over the ranks, and join the ranks' parts along dimension `gather`."""
    parts = x.unflatten(split, (ranks.world_size, -1)).movedim(split, 0)
    return ranks.exchange(parts).movedim(0, gather).flatten(gather, gather + 1)


def take_part(ranks: Ranks, model: GPT, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return this rank's part of idx and targets. Attention needs the rest of the batch, `starts`, whole."""
    idx, targets, *starts = batch
    return *(tensor.chunk(ranks.world_size, dim=1)[ranks.rank] for tensor in (idx, targets)), *starts


def average_loss(ranks: Ranks, model: GPT, batch: tuple[Tensor, ...], loss: Tensor) -> Tensor:
    """Return the mean loss of all ranks' tokens, with a gradient that is right after the ranks have averaged it."""
    count = (batch[1] != IGNORED).sum()
    loss_sum, total = ranks.sum(torch.stack((loss.detach() * count, count)))
    total = total.clamp(min=1)
    weighted = loss * (count * ranks.world_size / total)
    return loss_sum / total + (weighted - weighted.detach())  # the difference is 0, and has the gradient
