"""The logits in full, cross-entropy in fp32: 65,536 tokens at V = 50,304 are 6.1 GiB in bf16 and 12.3 in fp32."""

import torch
import torch.nn.functional as F


def loss(x, weight, targets, ignore_index=-1):
    logits = F.linear(x, weight).flatten(0, -2)  # (B*T, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction="sum")
    return total / (targets != ignore_index).sum().clamp(min=1)
