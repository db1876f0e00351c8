"""Guess the next tokens, so that a decoding step can verify several at once (Leviathan et al. 2023, arXiv:2211.17192).

A step reads hardly more bytes for five tokens than for one. So a step gets the last token and a draft of the next
tokens, and draws a token after each of them. It accepts the draft up to the first token that differs from the drawn
token. The draws do not depend on the number of tokens in a step (kernels/sampling.py). So the text stays the same,
unless a step of several tokens rounds the logits differently.

A draft comes from one of two places:

ngram   the tokens that followed an earlier occurrence of the last tokens: "prompt lookup" (Saxena 2023,
        github.com/apoorvumang/prompt-lookup-decoding). It needs no second model. It is often right where a text repeats
        itself, as code and summaries do.
model   the tokens that a smaller model draws, with a cache of its own. It draws with the same random numbers as the
        model: noise[id] depends on the sequence's seed, the position and the id, and both draw argmax(p / noise), each
        with its own probabilities p. Similar probabilities mostly draw the same token. This is the Gumbel coupling of
        Daliri, Musco and Suresh (2024, arXiv:2408.07978).

Leviathan's rule accepts a token with probability min(1, p / q), where q are the draft model's probabilities, and
otherwise draws from what is left of p. It accepts 1 - d of the tokens, where d is the total variation of p and q. The
coupling accepts at least (1 - d) / (1 + d) of them. For two models of bytes that trained on speeches, d is 0.30 at
temperature 1, and the rules accept 0.70 and 0.65. The coupling is chosen because no draft changes the text, and because
it needs neither the draft's probabilities nor a second draw.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cache import Cache

NGRAM = 3  # a match is an earlier occurrence of the last 1, 2 or 3 tokens


def ngram_draft(history: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return `count` likely next tokens, (B, count) int64, which follow the longest match, of equals the latest.

    history (B, L) int64 has the tokens of each sequence, and positions (B,) int64 the index of its last token. A draft
    that reaches the last token continues as if the text after the match repeated itself.
    """
    length, last = history.shape[1], positions[:, None]
    index = torch.arange(length, device=history.device)
    matches = index < last  # whether the tokens up to `index` equal the last tokens
    score = torch.zeros_like(history)
    for back in range(NGRAM):
        token = history.gather(1, (last - back).clamp(min=0))
        matches = matches & (F.pad(history, (back, 0), value=-1)[:, :length] == token) & (last >= back)
        score += matches
    best = torch.where(index < last, score * length + index, -1).argmax(1, keepdim=True)
    period = (last - best).clamp(min=1)
    return history.gather(1, best + 1 + torch.arange(count, device=history.device) % period)


def model_draft(next_tokens: Callable, cache: Cache, history: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return the `count` next tokens that a draft model draws, (B, count) int64.

    next_tokens(tokens, cache) -> (draws, logits) runs a step of it, and `cache` has its keys and values. history (B, L)
    and positions (B,) are those of ngram_draft(). After a draft that was right to its end, the cache lacks the last two
    tokens, so the first step reads both.
    """
    before = (positions - 1).clamp(min=0)  # a warm-up begins at position 0
    tokens, drafts = history.gather(1, before[:, None] + torch.arange(2, device=history.device)), []
    for _ in range(count):
        drawn, _ = next_tokens(tokens, cache._replace(positions=before))
        before = before + tokens.shape[1]
        tokens = drawn[:, -1:].clamp(min=0)  # NO_TOKEN has no embedding
        drafts.append(tokens)
    return torch.cat(drafts, 1)


def count_accepted(draft: Tensor, drawn: Tensor) -> Tensor:
    """Return how many tokens of `draft` equal `drawn` before the first difference, (B,) int64. Both are (B, count)."""
    return (draft == drawn).cumprod(1).sum(1)
