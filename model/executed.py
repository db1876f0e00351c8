"""Who really computes each op of a model, at the shapes that it will see."""

import torch

from kernels.registry import AttnConfig, KernelsConfig, chosen, describe
from model.gpt import PRECISIONS, GPTConfig


def executed(
    config: GPTConfig,
    kernels: KernelsConfig,
    attn: AttnConfig,
    precision: str,
    shape: tuple[int, int],
    device: torch.device,
    keys: int | None = None,
    documents: bool = False,
) -> dict[str, str | bool]:
    """Op -> backend and version for tokens of this shape (B, T); with `keys`, for a decoding step over so many; with
    `documents`, for attention that stays inside them."""
    stored, compute = PRECISIONS[precision]
    limits = {"keys": keys, "lengths": [keys] * shape[0]} if keys else {"packed": config.pos == "learned"}
    limits |= {"kv_heads": config.kv_heads, "window": config.window}
    limits |= {"documents": [shape[1]]} if documents else {}
    limits |= {"version": attn.version}
    shapes = {
        "norm": {"shape": (*shape, config.n_embd), "residual_dtype": stored},
        "attention": {"shape": (*shape, config.n_head, config.head_dim), **limits},
        "mlp": {"shape": (*shape, config.n_embd)},
        "loss": {"shape": (*shape, config.n_embd), "vocab": config.vocab_size},
    }
    names = chosen(kernels, attn)
    if keys:
        del names["loss"]  # decoding has none
    ops = {op: describe(op, impl, dtype=compute, device=device, **shapes[op]) for op, impl in names.items()}
    return {**ops, "compile": kernels.compile}
