"""The LM head and its cross-entropy, in plain PyTorch. Say here what the kernel does, why it is fast, whose idea it is.

    x             (..., C)  in the compute dtype
    weight        (V, C)    in the compute dtype; the head, which is also the token embedding
    targets       (...)     int64
    ignore_index            positions with this target do not count
    softcap                 a number or None; with it the logits are softcap tanh(logits / softcap)

It returns the mean loss of the positions that count, a scalar in fp32; 0 if there is none. Head and cross-entropy are
one op so that a kernel need not store the logits (..., V). The contract, kernels/loss/__init__.py, also has the
argument fp8; without it the kernel is refused for precision=fp8.
"""

import torch
from torch import Tensor

# Your Triton kernel goes here. kernels/loss/triton.py is an example, and kernels/README.md lists the steps.


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1, softcap: float | None = None) -> Tensor:
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32)).flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counts = targets.flatten() != ignore_index
    target_logits = logits.gather(-1, targets.flatten().where(counts, 0).unsqueeze(-1)).squeeze(-1)
    losses = torch.logsumexp(logits, -1) - target_logits
    return losses.where(counts, 0).sum() / counts.sum().clamp(min=1)
