"""LM head and cross-entropy together, one chunk of tokens at a time, so that the (N, V) logits never exist.

For N = 65,536 tokens and V = 50,304 the logits are 6.6 GB in bf16, and their gradient is as large. This file uses the
idea of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989): the forward already computes the gradients, so a chunk of n
tokens needs one (n, V) buffer, and only until its gradients are done.

    p       = exp(x W^T - shift)                               _exponentials.py: a matmul that exponentiates
    losses, and the scale of each row of p                     _unnormalised.py
    dx      = scale (p W)                                      cuBLAS
    dW     += p^T (scale x)                                    cuBLAS, summed in fp32

So in bf16 not even the logits of a chunk exist. _unnormalised.py explains why p need not be normalised. In fp16 p would
overflow, and in fp32 its rounding would show. There cuBLAS computes the logits, and _softmax.py writes their gradient
over them. Without gradients, in validation, _softmax.py computes only the losses from the logits.

dx and dW are gradients of the sum of the losses. Those of the mean would be too small for fp16, which rounds 1e-8 to 0.
backward() multiplies dx and dW by dout, the derivative of the final loss by this sum. It multiplies in fp32, and rounds
the products.

A chunk has as many tokens as LOGITS_BYTES allows, because every chunk also reads and writes the fp32 dW once (155 MB at
C = 768).

With fp8 the three products are in fp8. cuBLAS cannot add such a product to dW: each sum moves another 0.6 GB, 0.15 ms.
So the chunks of a group write their dlogits by columns into one matrix, and the group has one product. At C = 768 the
dx of a chunk of 5,632 tokens has 44 x 3 tiles of 128 x 256: one for each multiprocessor of an H200.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.direct import custom_op
from kernels.fp8 import E5M2, X_SCALE, gradient_scale, product
from kernels.gpu import check_dtypes
from kernels.gpu import triton_and_cublas_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.loss import LOGITS_SCALE, _exponentials, _in_forward, softcap_argument
from kernels.loss._softmax import cross_entropy_kernel, dlogits_fp8_kernel, scale_kernel
from kernels.loss._unnormalised import unnormalised_gradient
from kernels.quantize import candidates as quantize_candidates
from kernels.quantize import choose_tile_launch, empty_fp8, quantize, quantize_weight, unit_tensor
from kernels.tuned import launch_parameters

LOGITS_BYTES = 400 * 2**20  # the size of one chunk's logits: 4,096 tokens at V = 50,304 in bf16
FP8_LOGITS_BYTES = 544 * 2**20  # 5,632 tokens
FP8_COLUMNS_BYTES = 560 * 2**20  # of a group's dlogits by columns: 2 chunks
RUNS = {
    "fp8": ("^dlogits_fp8_kernel|::linear_cross_entropy_fp8",),
    "triton": ("^_cross_entropy_exp_kernel|^cross_entropy_kernel|::linear_cross_entropy",),
}
FAMILY = "dlogits"


def candidates(kernel: str, default: dict) -> list[dict]:
    """Return the launch parameters that scripts/tune.py tries for `kernel`.

    For the chunk it tries one or two more tiles of 128 tokens, because the tiles of the matmuls may then divide evenly
    among the multiprocessors.
    """
    if kernel in ("quantize", "dlogits_fp8"):
        return quantize_candidates()
    if kernel == "cross_entropy_exp":
        return _exponentials.candidates()
    if kernel.startswith("linear_cross_entropy"):
        return [{"chunk": default["chunk"] + more} for more in (128, 256)]
    choices = (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32)
    return [{"BLOCK_V": columns, "num_warps": warps} for columns, warps in choices]


def softmax_launch(V: int) -> dict[str, int]:
    """Return the kernel's launch parameters for rows of width V: 16 elements a thread."""
    columns = min(8192, triton.next_power_of_2(V))
    return {"BLOCK_V": columns, "num_warps": max(1, columns // 512)}


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    ignore_index: int,
    write: bool,
    shifts: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Write the losses (n,) in fp32 of contiguous logits (n, V), which are capped if `softcap` is given.

    If write is True, also overwrite the logits with the gradient of the sum of the losses. If `shifts` is given, (n,)
    fp32, dlogits_in_fp8() can compute the gradient from what is written there.
    """
    V = logits.shape[1]
    launch = launch_parameters("cross_entropy", f"{V} {logits.dtype}", softmax_launch(V), logits.device)
    cross_entropy_kernel[(len(logits),)](
        logits, targets, losses, shifts, ignore_index, V=V, WRITE=write, SOFTCAP=softcap, **launch
    )


def dlogits_in_fp8(
    logits: Tensor,
    targets: Tensor,
    shifts: Tensor,
    scale: Tensor,
    columns: Tensor,
    ignore_index: int,
    softcap: float | None,
) -> Tensor:
    """Return the gradient of contiguous logits (N, V) in e5m2 by rows, and write it by columns into columns[:, :N].

    `columns` is a slice of a contiguous matrix. `scale` is the scale of the gradient, a scalar in fp32.
    """
    N, V = logits.shape
    _, programs, launch = choose_tile_launch("dlogits_fp8", logits)
    rows = empty_fp8(N, V, E5M2, logits.device)
    dlogits_fp8_kernel[(programs,)](
        logits_ptr=logits,
        targets_ptr=targets,
        shifts_ptr=shifts,
        scale_ptr=scale,
        rows_ptr=rows,
        columns_ptr=columns,
        ignore_index=ignore_index,
        N=N,
        all_rows=columns.stride(0),
        V=V,
        SOFTCAP=softcap,
        **launch,
    )
    return rows


def chunk_tokens(kernel: str, x: Tensor, V: int, logits_bytes: int) -> int:
    """Return how many tokens a chunk of x (N, C) has, if the table of launch parameters does not say another number."""
    default = {"chunk": max(1, logits_bytes // (V * x.element_size()) // 128 * 128)}
    return launch_parameters(kernel, f"{x.shape[1]} {V} {x.dtype}", default, x.device)["chunk"]


def compute_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    gradients: bool,
    whole: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses in fp32, and its gradients, for x (N, C), weight (V, C) and targets (N,).

    dx has the dtype of x, and dweight is in fp32. If gradients is False, they are empty. If whole is True, all tokens
    are one chunk.
    """
    options = {"exponentials": _exponentials.exponentials if x.dtype == torch.bfloat16 else None, "softcap": softcap}
    return linear_cross_entropy_in_chunks(x, weight, targets, ignore_index, gradients, whole, **options)


def linear_cross_entropy_in_chunks(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    gradients: bool,
    whole: bool,
    *,
    cross_entropy: Callable = cross_entropy_,
    exponentials: Callable | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute linear_cross_entropy(), a chunk of tokens at a time.

    `cross_entropy` is cross_entropy_() or a function like it. With `exponentials`, unnormalised_gradient() takes its
    place where gradients are needed. They must take `softcap` if it is not None.
    """
    N, V, cap = len(x), len(weight), softcap_argument(softcap)
    chunk = N if whole else chunk_tokens("linear_cross_entropy", x, V, LOGITS_BYTES)
    losses = torch.empty(N, dtype=torch.float32, device=x.device)
    _, dx, dweight = empty_outputs(x, weight, targets, ignore_index, gradients)
    buffer = x.new_empty(min(chunk, N), V)
    for start in range(0, N, chunk):
        tokens = slice(start, start + chunk)
        x_chunk, scales = x[tokens], None
        dlogits = buffer[: len(x_chunk)]
        if gradients and exponentials:
            x_chunk, scales = unnormalised_gradient(
                x_chunk,
                weight,
                targets[tokens],
                losses[tokens],
                ignore_index,
                dlogits,
                exponentials=exponentials,
                **cap,
            )
        else:
            torch.mm(x_chunk, weight.T, out=dlogits)
            cross_entropy(dlogits, targets[tokens], losses[tokens], ignore_index, gradients, **cap)
        if not gradients:
            continue
        torch.mm(dlogits, weight, out=dx[tokens])
        if scales is not None:
            dx[tokens].mul_(scales)
        add_product(dlogits.T, x_chunk, dweight, first=start == 0)
    return losses.sum(), dx, dweight


def add_product(a: Tensor, b: Tensor, total: Tensor, first: bool) -> None:
    """Add a @ b to `total`, which is in fp32; if it is the `first` product, overwrite `total` with it."""
    if a.is_cuda and a.dtype != torch.float32:  # cuBLAS adds a product of 16-bit matrices to a sum in fp32
        options = {"out_dtype": torch.float32, "out": total}
        if first:
            torch.mm(a, b, **options)
        else:
            torch.addmm(total, a, b, **options)
    else:
        torch.addmm(total, a.float(), b.float(), beta=0 if first else 1, out=total)


def empty_outputs(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate what linear_cross_entropy() returns: the operator's fake implementation, here and in other files."""
    dx = x.new_empty(x.shape if gradients else 0)
    dweight = weight.new_empty(weight.shape if gradients else 0, dtype=torch.float32)
    return x.new_empty((), dtype=torch.float32), dx, dweight


def compute_loss_in_fp8(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    gradients: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like linear_cross_entropy() in chunks, with the products in fp8."""
    N, V = len(x), len(weight)
    # multiples of 16, so that a group's padded columns match a slice of x_columns
    chunk = triton.cdiv(chunk_tokens("linear_cross_entropy_fp8", x, V, FP8_LOGITS_BYTES), 16) * 16
    group = max(1, FP8_COLUMNS_BYTES // (V * chunk)) * chunk
    count = (targets != ignore_index).sum().clamp(min=1)
    losses, shifts = (torch.empty(N, dtype=torch.float32, device=x.device) for _ in range(2))
    x_unit, scale = unit_tensor(X_SCALE, x.device), gradient_scale(count, LOGITS_SCALE) / count
    unit = 1 / scale
    x_rows, x_columns, _ = quantize(x, x_unit)
    weight_rows, weight_columns, weight_unit = quantize_weight(weight)
    dx, dweight = x.new_empty(x.shape if gradients else 0), weight.new_empty(0, dtype=torch.float32)
    for start in range(0, N, chunk):
        tokens, in_group = slice(start, start + chunk), start % group
        logits = product(x_rows[tokens], weight_rows, (x_unit, weight_unit), x.dtype, fast=False)
        cross_entropy_(logits, targets[tokens], losses[tokens], ignore_index, False, shifts[tokens], softcap)
        if not gradients:
            continue
        if in_group == 0:
            columns = empty_fp8(V, min(group, N - start), E5M2, x.device)
        rows = dlogits_in_fp8(
            logits, targets[tokens], shifts[tokens], scale, columns[:, in_group:], ignore_index, softcap
        )
        del logits
        dx[tokens] = product(rows, weight_columns, (unit, weight_unit), x.dtype)
        del rows
        if in_group + chunk >= columns.shape[1]:  # the group is complete
            first = start - in_group
            x_group = x_columns[:, first : first + columns.shape[1]]
            part = product(columns, x_group, (unit, x_unit), torch.float32)
            dweight = part if first == 0 else dweight.add_(part)
            del columns, part
    return losses.sum(), dx, dweight


def launch_scale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute scale_gradient() for a scalar factor. On an H200, 65,536 x 768 takes 0.06 ms, and 0.20 in PyTorch."""
    out = torch.empty_like(gradient, dtype=dtype)
    scale_kernel[(triton.cdiv(gradient.numel(), 4096),)](gradient, factor, out, gradient.numel(), BLOCK=4096)
    return out


scale_in_one_pass = custom_op(
    "hotswap::scale_in_one_pass", launch_scale, lambda gradient, _, dtype: torch.empty_like(gradient, dtype=dtype)
)
backward = partial(_in_forward.backward, scale=scale_in_one_pass)
linear_cross_entropy = custom_op(
    "hotswap::linear_cross_entropy", compute_loss, empty_outputs, backward, _in_forward.setup_context
)
linear_cross_entropy_fp8 = custom_op(
    "hotswap::linear_cross_entropy_fp8", compute_loss_in_fp8, empty_outputs, backward, _in_forward.setup_context
)


def loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    fp8: bool = False,
    softcap: float | None = None,
) -> Tensor:
    check_dtypes("loss", x, weight, fp8=fp8)
    if fp8:
        return apply_to_rows(linear_cross_entropy_fp8, x, weight, targets, ignore_index, softcap)
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index, False, softcap)  # in chunks, not whole


def apply_to_rows(op: Callable, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, *options: Any) -> Tensor:
    """Call `op` with x as (N, C) and return the mean loss. `op` computes gradients only if autograd will need them.

    `options` are further arguments of `op`, such as `whole` and `softcap` of linear_cross_entropy().
    """
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    x, targets = x.reshape(-1, x.shape[-1]).contiguous(), targets.reshape(-1)
    loss_sum, _, _ = op(x, weight, targets, ignore_index, gradients, *options)
    return loss_sum / (targets != ignore_index).sum().clamp(min=1)
