"""Activation checkpointing: the backward recomputes each block from the block's input (arXiv:1604.06174).

A step then saves one tensor a block: 18 KB a token for 12 layers of 768 channels in bf16. `checkpointing=host` moves
these tensors to pinned host memory until the backward needs them. `keep_attention` also saves the output of attention,
another 19 KB a token, so that the backward does not run its forward a second time.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import signature

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kernels.registry import checkpointed_operators


class BlockRunner:
    """Calls a block: block(x, residual, **rest). If gradients are on, it uses a checkpoint as the config says."""

    def __init__(self, checkpointing: str, keep_attention: bool, attention: Callable, dropout: float):
        self.checkpointing = checkpointing  # none | block | host; chunks: the block itself recomputes
        # Without dropout a block draws no random numbers. A CUDA graph cannot contain a copy of their state
        self.options = {"preserve_rng_state": dropout > 0}
        if keep_attention:
            policy = partial(save_or_recompute, checkpointed_operators(attention))
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
            if "respect_saved_tensors_hooks" in signature(checkpoint).parameters:  # PyTorch 2.15 warns without it
                self.options["respect_saved_tensors_hooks"] = False  # the output of attention stays on the GPU

    def __call__(self, block: nn.Module, x: Tensor, residual: Tensor | None, **rest) -> tuple[Tensor, Tensor]:
        if self.checkpointing in ("none", "chunks") or not torch.is_grad_enabled():
            return block(x, residual, **rest)
        if residual is not None:
            # Save one tensor instead of two: by prediction, 2.7 million tokens of 124M fit instead of 2.0 million
            x, residual = residual + x, None
        # Offload only the block's input. The checkpoint recomputes everything else, and `rest` is not offloaded because
        # it is not an argument of the checkpoint
        with save_on_cpu(pin_memory=True) if self.checkpointing == "host" else nullcontext():
            return checkpoint(partial(block, **rest), x, residual, use_reentrant=False, **self.options)


def save_or_recompute(saved: Sequence[str], _, op, *args, **kwargs) -> CheckpointPolicy:
    """The policy of a selective checkpoint: save the outputs of the operators in `saved`, and recompute all others."""
    return CheckpointPolicy.MUST_SAVE if op.name() in saved else CheckpointPolicy.PREFER_RECOMPUTE
