"""The one count of parameters, FLOPs and bytes of a GPTConfig, by formula, without building the model."""

import torch

from model.config import GPTConfig


def parameters(config: GPTConfig) -> int:
    """The number of parameters. If the head is the token table, it counts once."""
    C, F, bias = config.n_embd, config.hidden_size, int(config.bias)
    norm = C * (1 + (bias if config.norm == "layernorm" else 0))
    queries = config.n_head * config.head_size  # C, unless head_dim says otherwise
    heads = queries + 2 * config.kv_heads * config.head_size  # the width of c_attn: 3C without GQA
    rows = 2 * F if config.mlp == "swiglu" else F  # of c_fc: 4C in GPT-2
    # weights: c_attn, attn.c_proj, c_fc, mlp.c_proj, q_norm and k_norm; biases: those of the first four
    block = 2 * norm + (heads + queries + rows + F) * C + 2 * config.head_size * config.qk_norm
    block += (heads + C + rows + C) * bias
    return config.vocab_size * C + lookup_parameters(config) + config.n_layer * block + norm


def position_parameters(config: GPTConfig) -> int:
    """The parameters of the position table."""
    return config.block_size * config.n_embd if config.pos == "learned" else 0


def lookup_parameters(config: GPTConfig) -> int:
    """The parameters of the tables from which rows are only looked up, not multiplied: they cost no FLOPs."""
    tokens = 0 if config.tie_embeddings else config.vocab_size * config.n_embd
    return position_parameters(config) + tokens


def figures(config: GPTConfig, length: int) -> dict[str, float]:
    """The row's keys about a model that trains on sequences of `length` tokens."""
    return {
        "parameters": parameters(config),
        "position_parameters": position_parameters(config),
        "flops_per_token": flops_per_token(config, length),
    }


def flops_per_token(config: GPTConfig, length: int) -> float:
    """Training FLOPs a token for sequences of T = length tokens: 6 N + 12 L C T (PaLM, arXiv:2204.02311, appendix B).

    N leaves out the tables of lookup_parameters(), and C is the width of all heads. Attention counts in full, although
    a causal kernel may skip half of it. With a sliding window, T is at most the window.
    """
    T = min(length, config.window or length)
    attention = 12 * config.n_layer * config.n_head * config.head_size * T
    return 6 * (parameters(config) - lookup_parameters(config)) + attention


def prefill_flops(config: GPTConfig, batch: int, length: int) -> float:
    """FLOPs of a prefill of `batch` prompts: a third of flops_per_token() a token, but one token of the head each."""
    head = config.vocab_size * config.n_embd
    return batch * (length * (flops_per_token(config, length) / 3 - 2 * head) + 2 * head)


def kv_cache_bytes(config: GPTConfig, batch: int, length: int, dtype: torch.dtype) -> int:
    """The bytes of the keys and values of `length` tokens of `batch` sequences, in all layers."""
    return 2 * config.n_layer * batch * length * config.kv_heads * config.head_size * dtype.itemsize


def decode_bytes(config: GPTConfig, batch: int, length: int, dtype: torch.dtype) -> int:
    """The bytes that a decoding step with `length` keys must read at least: all weights and the cache, in `dtype`.

    The step reads one row of a table of lookup_parameters(); this row is not counted.
    """
    weights = (parameters(config) - lookup_parameters(config)) * dtype.itemsize
    return weights + kv_cache_bytes(config, batch, length, dtype)


def describe(config: GPTConfig, length: int) -> tuple[str, str]:
    """Return two texts for a run to print: the shape of the model, and flops_per_token() with its numbers."""
    heads, changes = f"{config.n_head} heads", GPTConfig.changes(vars(config))
    if changes.pop("head_dim", None):
        heads += f" of {config.head_dim}"
    if changes.pop("n_kv_head", None):
        heads += f" ({config.n_kv_head} of keys and values)"
    shape = f"{config.n_layer} layers, {heads}, {config.n_embd} wide, {config.pos} positions"
    if changes.pop("window", None):
        shape += f", a window of {config.window:,}"
    shape += "".join(f", {key}={value}" for key, value in changes.items())
    matmul_parameters = parameters(config) - lookup_parameters(config)
    keys = min(length, config.window or length)
    flops = f"6 x {matmul_parameters / 1e6:.1f}M + 12 x {config.n_layer} x {config.n_head * config.head_size} x {keys}"
    return f"{parameters(config) / 1e6:.1f}M: {shape}", flops
