"""The one accounting: parameters, FLOPs and bytes of a GPTConfig, by formula, without building the model."""

import torch

from model.gpt import GPTConfig


def parameters(config: GPTConfig) -> int:
    """All of them; the head is tied to the token table and counts once."""
    C, bias = config.n_embd, int(config.bias)
    norm = C * (1 + bias)
    heads = (config.n_head + 2 * config.kv_heads) * config.head_dim  # the width of c_attn: 3C without GQA
    block = 2 * norm + (9 * C + heads) * C + (6 * C + heads) * bias  # c_proj C^2, mlp 8C^2; biases C, 4C, C
    return config.vocab_size * C + positions(config) + config.n_layer * block + norm


def positions(config: GPTConfig) -> int:
    """Parameters of the position table: looked up, never multiplied."""
    return config.block_size * config.n_embd if config.pos == "learned" else 0


def flops_per_token(config: GPTConfig, length: int) -> float:
    """Training FLOPs a token at sequence length T: 6 N + 12 L C T (PaLM, arXiv:2204.02311, appendix B).

    N leaves the position table out; attention is counted whole, without the half that a causal kernel may skip. With
    a sliding window T is no more than that.
    """
    seen = min(length, config.window or length)
    return 6 * (parameters(config) - positions(config)) + 12 * config.n_layer * config.n_embd * seen


def kv_cache_bytes(config: GPTConfig, batch: int, length: int, dtype: torch.dtype) -> int:
    """Keys and values of `length` tokens of `batch` sequences, in all layers."""
    return 2 * config.n_layer * batch * length * config.kv_heads * config.head_dim * dtype.itemsize


def decode_bytes(config: GPTConfig, batch: int, length: int, dtype: torch.dtype) -> int:
    """What a decoding step with `length` keys must read at least, in the compute dtype: weights and cache.

    Of the position table it reads one row, which is left out.
    """
    weights = (parameters(config) - positions(config)) * dtype.itemsize
    return weights + kv_cache_bytes(config, batch, length, dtype)
