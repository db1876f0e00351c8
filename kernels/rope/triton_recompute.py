"""Rotary positions with a backward that recomputes the norm from the output, so autograd does not save the input.

With the norms of queries and keys, autograd saves the packed tensor for triton.py, 3 C numbers a token. The output is
in memory anyway, because attention saves it for its own backward. From the output the backward can recompute xhat:

    turned back, the output is xhat weight    so    xhat = (turned back) / weight

Besides the output it needs only rstd, 4 bytes for each query and key. In bf16 that saves 4.5 KB a token and layer at
C = 768: a sixth of the activations of modern_124m. Without norms there is nothing to save, and this is triton.py.

The price is rounding, as in kernels/norm/triton_recompute.py. Rounding moves each channel of a pair by up to 2^-8 of
itself, and turning back mixes the two. So xhat moves by up to sqrt(2) 2^-8 times the pair's larger |xhat|, times the
ratio of the pair's weights. If a ratio is beyond 16 (in fp32 1024), or a weight is 0, then its dweight is NaN, and so
is all of dx of the queries, or of the keys. The optimizer then refuses the step, and why_nan() gives the reason. The
kernels are those of triton.py, and move as many bytes besides rstd.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op
from kernels.gpu import check_dtypes
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.norm._triton_backward import max_ratio
from kernels.rope.triton import _rope_fwd_kernel, backward, choose_launch, rope_fwd

RUNS = "^_rope_fwd_kernel|::rope_(fwd|recompute)", "^_rope_bwd_kernel|::rope_bwd"
FAMILY = "_rope_"


def launch_forward(
    qkv: Tensor, table: Tensor, kv_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return what launch_forward() of triton.py does, and rstd of the queries and keys, (B, T, H + Hkv) in fp32."""
    out, rstd = empty_outputs(qkv, table, kv_heads)
    grid, arguments = choose_launch("rope_fwd", qkv, table, kv_heads, q_weight, k_weight, eps)
    _rope_fwd_kernel[grid](x_ptr=qkv, out_ptr=out, rstd_ptr=rstd, **arguments)
    return out, rstd


def empty_outputs(qkv: Tensor, table: Tensor, kv_heads: int, *_: object) -> tuple[Tensor, Tensor]:
    B, T, heads, _ = qkv.shape
    return torch.empty_like(qkv), qkv.new_empty(B, T, heads - kv_heads, dtype=torch.float32)


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, table, kv_heads, q_weight, k_weight, eps = inputs
    ctx.save_for_backward(*output, table, q_weight, k_weight)
    ctx.options = kv_heads, eps
    ctx.mark_non_differentiable(output[1])


rope_recompute = custom_op("hotswap::rope_recompute", launch_forward, empty_outputs, backward, _setup_context)


def why_nan(q_weight: Tensor, k_weight: Tensor) -> str | None:
    """Return why these weights make gradients NaN. Return None if they do not. Synchronises."""
    limit, count = max_ratio(q_weight.dtype), 0
    for weight in (q_weight, k_weight):
        partners = weight.roll(len(weight) // 2)
        count += int(((weight == 0) | ~(partners.abs() <= limit * weight.abs())).sum())
    if not count:
        return None
    return (
        f"rope=triton_recompute divides by the weights of the norms, and {count} of {2 * len(q_weight)} are too small: "
        f"0, or below 1 / {limit:g} of the weight whose channel turns with theirs; choose kernels.rope=triton"
    )


def rope(
    qkv: Tensor,
    table: Tensor,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    check_dtypes("rope", qkv, q_weight)
    rows = table.reshape(2, -1, table.shape[-1]).contiguous()
    if q_weight is None:
        return rope_fwd(qkv.contiguous(), rows, kv_heads, None, None, eps)
    return rope_recompute(qkv.contiguous(), rows, kv_heads, q_weight, k_weight, eps)[0]
