"""PyTorch's fused AdamW. It takes gradients in fp32, so clipping and rounding are passes of their own.

A training run calls the same kernel for lists of tensors, which need not be copied into a flat one: TorchAdamW in
model/optim.py.
"""

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from kernels.adamw import CHANGED
from kernels.direct import custom_op

RUNS = ("(?i)fused_?(adam|optimizer)",)


def update(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor,
    gradient: Tensor,
    lr: Tensor,
    scale: Tensor,
    updates: Tensor,
    refuse: Tensor,
    decayed: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    gradient = gradient.to(master.dtype) * scale
    for part, decay in ((slice(decayed), weight_decay), (slice(decayed, None), 0.0)):
        if master[part].numel() == 0:
            continue
        torch_adamw(
            [master[part]],
            [gradient[part]],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            max_exp_avg_sqs=[],
            state_steps=[(updates - 1).float()],  # the function adds 1
            fused=True,
            found_inf=refuse.float(),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr.float(),
            weight_decay=decay,
            eps=eps,
            maximize=False,
        )
    weight.copy_(torch.where(refuse, weight, master))


# An operator, because torch.compile cannot trace PyTorch's function
adamw = custom_op("hotswap::adamw_eager", update, lambda *_: None, mutates_args=CHANGED)
