"""The contract of the op adamw: one update of all weights by AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).

    adamw(master, exp_avg, exp_avg_sq, weight, gradient, lr, scale, updates, refuse, decayed, beta1, beta2, eps,
          weight_decay) -> None

It changes the first four tensors in place. All weights of a model are in one flat tensor, the matrices first:

    master      (n,) fp32     the weights
    exp_avg     (n,) fp32     mean of the gradients
    exp_avg_sq  (n,) fp32     mean of their squares
    weight      (n,)          the model's weights: the rounded master
    gradient    (n,)          multiplied by `scale` before use, which clips it. After several micro-steps it is fp32
    lr, scale   () fp32       the learning rate, and the factor of the gradient
    updates     () fp64       t, the number of this update, from 1. The moments are divided by 1 - beta^t
    refuse      () bool       true: nothing changes
    decayed     int           the first `decayed` weights decay, each by lr * weight_decay of itself
    beta1, beta2, eps, weight_decay    floats

The scalars that change from step to step are on the device, so that a CUDA graph can contain the update. n is a
multiple of MULTIPLE, so a kernel needs no mask.

The optimizer calls the op, and not the model (OPTIMIZER). The op has no gradients. Its bytes limit its speed.
kernels.adamw=eager trains with TorchAdamW (model/optim.py): PyTorch's fused AdamW over lists of tensors, which need not
be copied into a flat one. TorchAdamW also updates fp32 weights and sharded weights. All other backends run in FlatAdamW
(model/flat_adamw.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

OPTIMIZER = True  # the optimizer calls it, and it changes its arguments
DEFAULT = "auto"
MULTIPLE = 1024
CHANGED = "master", "exp_avg", "exp_avg_sq", "weight"
TENSORS = dict.fromkeys((*CHANGED, "gradient"), "n")
ANY_STRIDES = tuple(TENSORS)  # never made contiguous, because the copy would get the update: conflict() refuses them

SHAPES = {
    "124m": {"shape": (121_560 * MULTIPLE,), "decayed": 121_440 * MULTIPLE},
    "350m": {"shape": (346_800 * MULTIPLE,), "decayed": 346_400 * MULTIPLE},
}

# In 3008 and 1088 elements, the last block of 1024 has weights that decay and weights that do not
CASES = {
    "third_update": {"shape": (3 * MULTIPLE,), "decayed": 3008},
    "first_update": {"shape": (2 * MULTIPLE,), "decayed": 1088, "updates": 1},
    "late_update": {"shape": (2 * MULTIPLE,), "decayed": MULTIPLE, "updates": 10_000},
    "refused": {"shape": (2 * MULTIPLE,), "decayed": 1088, "refuse": True},
    "no_decay": {"shape": (MULTIPLE,)},
    "all_decay": {"shape": (MULTIPLE,), "decayed": MULTIPLE},
    "fp32_gradient": {"shape": (2 * MULTIPLE,), "decayed": 1088, "gradient_dtype": torch.float32},
}

SIZES = {str(n): {"shape": (n,), "decayed": n // 2} for n in (MULTIPLE, 64 * MULTIPLE)}
FEATURES = ["refused", "fp32_gradient"]

BOUND = "bytes"


def conflict(**arguments: Any) -> str | None:
    """Return why these tensors cannot be updated in place, or None."""
    n = arguments["master"].shape[0]
    if n % MULTIPLE:
        return f"n = {n} is no multiple of {MULTIPLE}"
    is_contiguous = all(arguments[name].is_contiguous() for name in TENSORS)
    return None if is_contiguous else "a tensor is not contiguous"


def reference(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the new (master, exp_avg, exp_avg_sq, weight). Unlike a backend, it changes none of its arguments."""
    gradient = gradient.to(master.dtype) * scale
    new_exp_avg = beta1 * exp_avg + (1 - beta1) * gradient
    new_exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient.square()
    correction1, correction2 = (1 - beta**updates for beta in (beta1, beta2))
    decay = weight_decay * (torch.arange(len(master), device=master.device) < decayed)
    update = (new_exp_avg / correction1) / ((new_exp_avg_sq / correction2).sqrt() + eps)
    new_master = (master - lr * decay * master - lr * update).to(master.dtype)
    states = (master, new_master), (exp_avg, new_exp_avg), (exp_avg_sq, new_exp_avg_sq)
    states = tuple(torch.where(refuse, old, new) for old, new in states)
    return *states, torch.where(refuse, weight, states[0].to(weight.dtype))


def results(function: Callable, /, **arguments: Any) -> tuple[Tensor, ...]:
    """Return the four tensors that a backend's function changes, from copies of the arguments."""
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    function(**copies)
    return tuple(copies[name] for name in CHANGED)


def inputs(
    shape: Sequence[int],
    *,
    decayed: int = 0,
    updates: int = 3,
    refuse: bool = False,
    gradient_dtype: torch.dtype | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of adamw(), as a dict. `dtype` is the weight's. gradient_dtype=None is the same."""
    generator = torch.Generator(device).manual_seed(seed)
    master, exp_avg, exp_avg_sq, gradient = (torch.randn(shape, generator=generator, device=device) for _ in range(4))
    scalars = {"lr": 0.1, "scale": 0.25, "updates": updates}
    dtypes = {"updates": torch.float64}
    return {
        "master": master,
        "exp_avg": 0.3 * exp_avg,
        "exp_avg_sq": 0.1 * exp_avg_sq.square(),
        "weight": master.to(dtype),
        "gradient": gradient.to(gradient_dtype or dtype),
        **{k: torch.full((), v, dtype=dtypes.get(k, torch.float32), device=device) for k, v in scalars.items()},
        "refuse": torch.full((), refuse, dtype=torch.bool, device=device),
        "decayed": decayed,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


def cost(
    shape: Sequence[int], *, gradient_dtype: torch.dtype | None = None, dtype: torch.dtype = torch.bfloat16, **_: object
) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes)}. It reads and writes three fp32 tensors, reads the gradient, writes weight."""
    [n] = shape
    return {"forward": (18 * n, n * (6 * 4 + (gradient_dtype or dtype).itemsize + dtype.itemsize))}
