"""The logits and their log-probabilities in full: 6.1 GiB each in bf16, at 65,536 tokens and V = 50,304.

log_softmax computes in fp32 and rounds to the logits' dtype on the way out, as it does under nanoGPT's autocast. An
fp32 softmax of bf16 logits would cost 61.6 ms and 36.8 GiB instead of 33.7 and 18.4 (one H200), for gradients that
are no nearer to float64's: bf16 logits are as coarse as bf16 log-probabilities.
"""

import torch
import torch.nn.functional as F


def loss(x, weight, targets, ignore_index=-1):
    logits = F.linear(x, weight).flatten(0, -2)  # (B*T, V)
    # torch.compile fuses the cast, and its backward then overwrites the logits: 28.5 GiB instead of 34.6 at 124M, B = 64
    dtype = torch.float32 if torch.compiler.is_compiling() and logits.dtype.itemsize < 4 else None
    log_probs = logits.log_softmax(-1, dtype=dtype)
    losses = F.nll_loss(log_probs, targets.flatten(), ignore_index=ignore_index, reduction="none")
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    return total / (targets != ignore_index).sum().clamp(min=1)
