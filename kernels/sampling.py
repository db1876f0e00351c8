"""Draw the next token. A draw depends only on the logits, the sequence's seed and the token's position.

So neither the batch nor the number of tokens in a step changes a draw. A hash of (seed, position, id) gives each id its
random number. This is a counter-based generator (Salmon et al. 2011) with the integer hash of
github.com/skeeto/hash-prospector. The numbers of a stateful generator would depend on the order of the draws.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

NO_TOKEN = -1  # what a row without probabilities draws: a logit is NaN or inf, or all are -inf
MASK = 2**32 - 1
ID_FACTOR, POSITION_FACTOR = 0x1E3779B1, 0x5BD1E995  # odd, and below 2^31 so that products fit into an int64
HASH_FACTORS = 0x21F0AAAD, 0x735A2D97


class Sampling(NamedTuple):
    """The settings of a draw. Ids from n_vocab on are padding of the vocabulary, and are never drawn."""

    n_vocab: int
    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # draw among the k most likely tokens; 0: among all
    top_p: float = 1.0  # draw among the fewest tokens that together have this probability (Holtzman et al. 2019)

    @property
    def candidates(self) -> int:
        """The number of tokens that remain after top_k."""
        return min(self.top_k or self.n_vocab, self.n_vocab)


def scramble(x: Tensor) -> Tensor:
    """Hash the low 32 bits of int64 values. The hashes are int64 in [0, 2^32)."""
    x = x & MASK
    first, second = HASH_FACTORS
    x = ((x ^ (x >> 16)) * first) & MASK
    x = ((x ^ (x >> 15)) * second) & MASK
    return x ^ (x >> 15)


def seeds_of(seed: int, batch: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the hashed seeds (batch,) int64. Sequence b has the seed of a single sequence with seed + b."""
    seeds = torch.arange(batch, dtype=torch.int64) + seed
    return (scramble(seeds) ^ scramble((seeds >> 32) + 1)).to(device)


def shift_positions(seeds: Tensor, by: int) -> Tensor:
    """Return hashed seeds that give position p the random numbers of position p + by."""
    return seeds + by * POSITION_FACTOR


def exponential_noise(ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """ids (N, K), hashed seeds (N,) and positions (N,), all int64 -> a draw from Exp(1) for each id, (N, K) fp32.

    The upper 23 bits of the hash give a uniform number between 2^-24 and 1 - 2^-24, which fp32 represents exactly. The
    noise is at least 2^-24, so an id of probability 1e-7 gets 94% of its share of the draws, and an id of 1e-8 gets 3%.
    """
    counter = (positions * POSITION_FACTOR + seeds).unsqueeze(1)
    uniform = ((scramble(ids * ID_FACTOR + counter) >> 9).float() + 0.5) * 2**-23
    return -uniform.log()


def sample_tokens(logits: Tensor, seeds: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """Draw a token for each row: logits (N, V), hashed seeds (N,), positions (N,) of the new tokens -> (N,) int64.

    top_k applies before top_p. If a limit falls among equal logits, any of them may be kept. A row draws NO_TOKEN if a
    logit is NaN or inf, or if all are -inf. A logit of -inf has probability 0.

    With noise from Exp(1), argmax(p / noise) is a draw from p: noise / p is exponential with rate p, and the i-th of
    these exponentials is the smallest with probability p_i. torch.multinomial would synchronise with the host.
    """
    logits = logits[:, : sampling.n_vocab]
    if sampling.temperature == 0:
        top, ids = logits.max(-1)
        return ids.where(top.abs() < math.inf, NO_TOKEN)
    if sampling.top_k or sampling.top_p < 1:
        # Sort in the compute dtype, because bf16 has half the bits of fp32
        logits, ids = logits.topk(sampling.candidates)
    else:
        ids = torch.arange(sampling.n_vocab, device=logits.device).expand_as(logits)
    p = (logits.float() / sampling.temperature).softmax(-1)  # all NaN if a logit is NaN or inf, or all are -inf
    if sampling.top_p < 1:
        # p is sorted. Keep a token, or a NaN, unless the probabilities before it sum to top_p or more
        p = p.masked_fill(p.cumsum(-1) - p >= sampling.top_p, 0)
    best, choice = (p / exponential_noise(ids, seeds, positions)).max(-1, keepdim=True)
    return ids.gather(-1, choice).where(best >= 0, NO_TOKEN).squeeze(-1)
