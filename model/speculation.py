"""Guess the next tokens, so that a decoding step can verify several at once (Leviathan et al. 2023, arXiv:2211.17192).

A step reads hardly more bytes for five tokens than for one. So a step gets the last token and a draft of the next
tokens, and draws a token after each of them. It accepts the draft up to the first token that differs from the drawn
token. The draws do not depend on the number of tokens in a step (kernels/sampling.py). So the text stays the same,
unless a step of several tokens rounds the logits differently.

The draft copies the tokens that followed an earlier occurrence of the last tokens: "prompt lookup" (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding). It needs no second model. It is often right where a text repeats itself,
as code and summaries do.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

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


def count_accepted(draft: Tensor, drawn: Tensor) -> Tensor:
    """Return how many tokens of `draft` equal `drawn` before the first difference, (B,) int64. Both are (B, count)."""
    return (draft == drawn).cumprod(1).sum(1)
