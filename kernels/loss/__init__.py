"""The contract of the op loss: the language-model head and the cross-entropy.

They are one op so that a backend need not store the (B*T, V) logits.

    loss(x, weight, targets, ignore_index=-1, fp8=False, softcap=None) -> scalar

    x        (..., C)  in the compute dtype
    weight   (V, C)    in the compute dtype; the (tied) head
    targets  (...)     int64
    scalar             the mean loss over all positions whose target is not ignore_index, in fp32 (in float64 if x is
                       float64); 0 with zero gradients if there is no such position

If a target other than ignore_index is outside [0, V), a backend raises an error or returns NaN.
With fp8=True, a backend and reference() compute the products as logits_in_fp8() does. With softcap, a positive number,
the logits are those of cap_logits(). A backend may lack each of these two arguments.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import fp8 as products_in_fp8

LOGITS_SCALE = 2.0**12  # times the targets that count. In one micro-step, probabilities below 2^-29 become 0

TENSORS = {"x": "... C", "weight": "V C", "targets": "..."}
ANY_STRIDES = ("x",)
OPTIONAL = ("fp8", "softcap")  # arguments that a backend may lack

SHAPES = {
    "124m": {"shape": (32768, 768), "vocab": 50304},
    "124m_fp8": {"shape": (32768, 768), "vocab": 50304, "fp8": True},
    "1558m": {"shape": (16384, 1600), "vocab": 50304},
    "smollm2-135m": {"shape": (32768, 576), "vocab": 49152},
}

CASES = {
    "768": {"shape": (2, 9, 768), "vocab": 384},
    "769": {"shape": (5, 769), "vocab": 257},
    "1025": {"shape": (4, 1025), "vocab": 257},
    "1600": {"shape": (3, 1600), "vocab": 257},
    "odd": {"shape": (13, 65), "vocab": 1031},
    "one_row": {"shape": (1, 64), "vocab": 257},
    "many_rows": {"shape": (1031, 32), "vocab": 96},
    "some_ignored": {"shape": (3, 11, 64), "vocab": 257, "ignored": 0.5},
    "all_ignored": {"shape": (3, 11, 64), "vocab": 257, "ignored": 1.0},
    "large_logits": {"shape": (16, 64), "vocab": 257, "scale": 30.0},
    "non_contiguous": {"shape": (6, 10, 64), "vocab": 257, "contiguous": False},
    "fp8": {"shape": (2, 32, 64), "vocab": 257, "fp8": True},
    "fp8_ignored": {"shape": (2, 256, 64), "vocab": 257, "ignored": 0.95, "fp8": True},
    "softcap": {"shape": (3, 11, 64), "vocab": 264, "ignored": 0.5, "scale": 5.0, "softcap": 5.0},  # 264: for Gluon
    "softcap_large_logits": {"shape": (16, 64), "vocab": 257, "scale": 30.0, "softcap": 15.0},
    "softcap_fp8": {"shape": (2, 32, 64), "vocab": 257, "ignored": 0.5, "scale": 5.0, "softcap": 5.0, "fp8": True},
}

# The doctor's matrix tests SIZES in every dtype. It tests FEATURES, names in CASES, in bf16 (on a CPU: fp32)
SIZES = {str(C): {"shape": (5, C), "vocab": 1024} for C in (64, 768, 769, 1600, 4096)}
FEATURES = ["all_ignored", "fp8", "softcap"]

BOUND = "flops"
GRADIENTS_IN_FORWARD = True  # some backends compute gradients in the forward, so its rate alone would mislead
FAMILY = r"log_softmax|cross_entropy|nll_loss|cunn_SoftMax"


def in_model(
    *,
    batch: int,
    length: int,
    n_embd: int,
    vocab_size: int,
    softcap: float | None = None,
    keys: int | None = None,
    **_: object,
) -> dict[str, Any] | None:
    if keys is not None:  # decoding has no loss
        return None
    return {"shape": (batch, length, n_embd), "vocab": vocab_size, **softcap_argument(softcap)}


def softcap_argument(softcap: float | None) -> dict[str, float]:
    """Return the argument softcap for a call, or nothing for None: a backend may lack the argument."""
    return {} if softcap is None else {"softcap": softcap}


def conflict(*, softcap: float | None = None, **_: object) -> str | None:
    if softcap is None or 0 < softcap < math.inf:
        return None
    return f"softcap={softcap} must be a positive number"


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(logits / softcap), which is between -softcap and softcap, or the logits for None.

    From Gemma 2 (arXiv:2408.00118), which caps at 30. Near 0 the logits hardly change. The derivative is
    1 - (result / softcap)^2. The result has the dtype of the logits, and is computed in fp32 (float64 in float64).
    """
    if softcap is None:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (softcap * torch.tanh(wide / softcap)).to(logits.dtype)


def logits_in_fp8(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the logits (..., V). A gradient of one is at most 1 / targets that count, which gives its scale."""
    count = (targets != ignore_index).sum().clamp(min=1)
    dy_scale = products_in_fp8.gradient_scale(count, LOGITS_SCALE)
    return products_in_fp8.linear(x, weight, dy_scale=dy_scale, fast=False)


def scale_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient (N, C) times factor, in `dtype`. The factor is in fp32, (N, 1) or a scalar.

    `gradient * scalar` would round the scalar to the dtype of the gradient first. In bf16 that changes 1 / 3 by 0.19%,
    and in fp16 65,536, the first scale of a GradScaler, becomes infinite. A tensor with a dimension is not rounded.
    """
    factor = factor if factor.dim() else factor.reshape(1)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def reference(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    fp8: bool = False,
    softcap: float | None = None,
) -> Tensor:
    logits = logits_in_fp8(x, weight, targets, ignore_index) if fp8 else x @ weight.T
    logits = cap_logits(logits.to(torch.promote_types(x.dtype, torch.float32)), softcap)
    not_ignored = targets != ignore_index
    target_logits = logits.gather(-1, targets.where(not_ignored, 0).unsqueeze(-1)).squeeze(-1)
    losses = torch.logsumexp(logits, -1) - target_logits
    return losses.where(not_ignored, 0).sum() / not_ignored.sum().clamp(min=1)


def inputs(
    shape: Sequence[int],
    *,
    vocab: int,
    ignored: float = 0.0,
    scale: float = 1.0,
    contiguous: bool = True,
    fp8: bool = False,
    softcap: float | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of loss(), as a dict.

    The logits, before the cap, have a standard deviation of about `scale`. A target is -1 with probability `ignored`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    width = shape[-1]

    def randn(*size: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(*size, generator=generator, device=device)).to(dtype)

    x = randn(*shape) if contiguous else randn(*shape[:-1], width + 8)[..., :width]
    targets = torch.randint(vocab, shape[:-1], generator=generator, device=device)
    is_ignored = torch.rand(shape[:-1], generator=generator, device=device) < ignored
    return {
        "x": x.detach().requires_grad_(),
        "weight": randn(vocab, width, std=scale * width**-0.5).requires_grad_(),
        "targets": targets.masked_fill(is_ignored, -1),
        **({"fp8": True} if fp8 else {}),
        **softcap_argument(softcap),
    }


def cost(
    shape: Sequence[int], *, vocab: int, dtype: torch.dtype = torch.bfloat16, **_: object
) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes), "backward": (FLOPs, bytes)}.

    There are three matmuls: the logits in the forward, dx and dweight in the backward. The bytes do not include the
    logits, because a backend need not store them.
    """
    width = shape[-1]
    rows = torch.Size(shape).numel() // width
    product = 2 * rows * width * vocab
    tensors = (rows * width + vocab * width) * dtype.itemsize
    return {"forward": (product, tensors + 8 * rows), "backward": (2 * product, 2 * tensors + 8 * rows)}


def products(shape: Sequence[int], *, vocab: int, **_: object) -> dict[str, list[tuple[int, int, int]]]:
    """Return (rows, inner, columns) of the plain matmuls, forward and backward: the floor of the op's time."""
    width = shape[-1]
    rows = torch.Size(shape).numel() // width
    return {"forward": [(rows, width, vocab)], "backward": [(rows, vocab, width), (vocab, rows, width)]}
