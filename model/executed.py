"""Which backend computes each op of a model, at the shapes that the op has in the model."""

import torch

from kernels.registry import AttnConfig, KernelsConfig, contract, describe, impl_by_op, runs_in_fp8
from model.gpt import PRECISIONS, GPTConfig


def executed_kernels(
    config: GPTConfig,
    kernels: KernelsConfig,
    attn: AttnConfig,
    precision: str,
    shape: tuple[int, int],
    device: torch.device,
    keys: int | None = None,
    documents: bool = False,
) -> dict[str, str | bool]:
    """Return op -> backend and version, and "compile" -> whether torch.compile is on. The tokens have `shape`, (B, T).

    With `keys`, describe a decoding step that reads `keys` keys, after a prefill of `shape`. If the decoder is not
    blocks, only the prefill runs the ops besides decode. With `documents`, attention stays inside documents.
    """
    if keys and kernels.decode == "blocks":
        shape = shape[0], 1
    residual_dtype, dtype = PRECISIONS[precision]
    sizes = {
        "batch": shape[0],
        "length": shape[1],
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "window": None if keys and kernels.decode == "blocks" else config.window,  # the cache has no other keys
        "learned_positions": config.pos == "learned",
        "residual_dtype": residual_dtype,
        "documents": documents,
        "keys": keys if keys and kernels.decode == "blocks" else None,
    }
    descriptions = {}
    for op, impl in impl_by_op(kernels, attn).items():
        in_model = getattr(contract(op), "in_model", None)
        arguments = in_model(**sizes) if in_model else None
        if arguments is not None:
            version = attn.version if op == "attention" else None
            if precision == "fp8" and runs_in_fp8(op, kernels):
                arguments["fp8"] = True
            descriptions[op] = describe(op, impl, version, **arguments, dtype=dtype, device=device)
    if keys:
        descriptions.pop("loss", None)
        descriptions["decode"] = describe("decode", kernels.decode)
    return {**descriptions, "compile": kernels.compile}
