"""The one count of parameters, FLOPs and bytes of a GPTConfig, by formula, without building the model."""

import torch

from model.config import GPTConfig


def parameters(config: GPTConfig) -> int:
    """The number of parameters. The head is the token table, so it counts once."""
    C, bias = config.n_embd, int(config.bias)
    norm = C * (1 + (bias if config.norm == "layernorm" else 0))
    queries = config.n_head * config.head_size  # C, unless head_dim says otherwise
    heads = queries + 2 * config.kv_heads * config.head_size  # the width of c_attn: 3C without GQA
    # weights: c_attn, c_proj, and 8C^2 of the MLP; biases: c_attn, and C, 4C, C
    block = 2 * norm + (heads + queries + 8 * C) * C + (heads + 6 * C) * bias
    return config.vocab_size * C + position_parameters(config) + config.n_layer * block + norm


def position_parameters(config: GPTConfig) -> int:
    """The parameters of the position table. They are looked up, not multiplied, so they cost no FLOPs."""
    return config.block_size * config.n_embd if config.pos == "learned" else 0


def figures(config: GPTConfig, length: int) -> dict[str, float]:
    """The row's keys about a model that trains on sequences of `length` tokens."""
    return {
        "parameters": parameters(config),
        "position_parameters": position_parameters(config),
        "flops_per_token": flops_per_token(config, length),
    }


def flops_per_token(config: GPTConfig, length: int) -> float:
    """Training FLOPs a token for sequences of T = length tokens: 6 N + 12 L C T (PaLM, arXiv:2204.02311, appendix B).

    N leaves out the position table, and C is the width of all heads. Attention counts in full, although a causal kernel
    may skip half of it. With a sliding window, T is at most the window.
    """
    T = min(length, config.window or length)
    attention = 12 * config.n_layer * config.n_head * config.head_size * T
    return 6 * (parameters(config) - position_parameters(config)) + attention


def prefill_flops(config: GPTConfig, batch: int, length: int) -> float:
    """FLOPs of a prefill of `batch` prompts: a third of flops_per_token() a token, but one token of the head each."""
    head = config.vocab_size * config.n_embd
    return batch * (length * (flops_per_token(config, length) / 3 - 2 * head) + 2 * head)


def kv_cache_bytes(config: GPTConfig, batch: int, length: int, dtype: torch.dtype) -> int:
    """The bytes of the keys and values of `length` tokens of `batch` sequences, in all layers."""
    return 2 * config.n_layer * batch * length * config.kv_heads * config.head_size * dtype.itemsize


def decode_bytes(config: GPTConfig, batch: int, length: int, dtype: torch.dtype) -> int:
    """The bytes that a decoding step with `length` keys must read at least: all weights and the cache, in `dtype`.

    The step reads one row of the position table; this row is not counted.
    """
    weights = (parameters(config) - position_parameters(config)) * dtype.itemsize
    return weights + kv_cache_bytes(config, batch, length, dtype)


def describe(config: GPTConfig, length: int) -> tuple[str, str]:
    """Return two texts for a run to print: the shape of the model, and flops_per_token() with its numbers."""
    heads = f"{config.n_head} heads"
    if config.n_kv_head:
        heads += f" ({config.n_kv_head} of keys and values)"
    shape = f"{config.n_layer} layers, {heads}, {config.n_embd} wide, {config.pos} positions"
    if config.window:
        shape += f", a window of {config.window:,}"
    matmul_parameters = parameters(config) - position_parameters(config)
    keys = min(length, config.window or length)
    flops = f"6 x {matmul_parameters / 1e6:.1f}M + 12 x {config.n_layer} x {config.n_head * config.head_size} x {keys}"
    return f"{parameters(config) / 1e6:.1f}M: {shape}", flops
