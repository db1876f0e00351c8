"""The loss and the gradient of the logits from unnormalised exponentials, which the epilogue of a matmul can write.

_softmax.py reads all logits and writes their gradient, softmax(logits) - onehot(target). At 65,536 tokens and
V = 50,304 that moves 13.2 GB, 3.2 ms at the copy rate of an H200, while the three matmuls take 23 ms. The pass seems
necessary, because a softmax needs the sum of its whole row. But the two matmuls that read the gradient are linear, so
they can read unnormalised exponentials. For dW the sum divides x before the matmul. For dx it divides the product:

    p          = exp(x W^T - shift)     in the epilogue of the matmul, which also sums each row of its tile
    total      = the sum of a row of p
    p[target] -= total                  one number of each row
    dx         = (p W) / total
    dW         = p^T (x / total)

At C = 768, x and dx have 65 times fewer numbers than p. FlashAttention (Dao et al. 2022, arXiv:2205.14135) also
divides last.

The shift of a row must be known before the matmul, so it cannot be the row's maximum. It is the target's logit + 32
(HEADROOM_BITS, in base 2), and this logit is a product of two vectors. Then total is at least 2^-32, and the loss of a
row is log2(total) + 32 bits. p is in bf16, which has the range of fp32, so it overflows only if the loss of a row is
above 128 + 32 bits, 110 nats. If a loss is above 77 nats, _cross_entropy_finish_kernel computes its row again with the
row's maximum as shift, and the 15 rows beside it.

With a soft cap, the exponentials are those of the capped logits. The matmul multiplies p by the slope of the cap, after
it has summed the rows, and the total that is subtracted from p[target] is multiplied by the target's slope. Two capped
logits differ by at most 2 cap. So at a cap of 30 and V = 50,304, total is below 2^71 (LARGEST is 2^80), and no row is
computed again.

The matmul is the backend's: _exponentials.py for triton.py, and gluon.py. The kernels here run before and after it.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.loss import softcap_argument
from kernels.loss._softcap import capped, times_slope_at_capped

LOG2E = tl.constexpr(1.4426950408889634)
HEADROOM_BITS = tl.constexpr(32.0)
LARGEST = tl.constexpr(2.0**80)  # of a row's total, so that x / total is far from the smallest number of bf16


@triton.jit(do_not_specialize=["N", "ignore_index"])
def _cross_entropy_shift_kernel(
    x_ptr,  # (N, C)
    w_ptr,  # (V, C)
    targets_ptr,  # (N,) int64
    target_logits_ptr,  # (N,) fp32
    ignore_index,
    N,
    V,
    C,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,  # None: no cap
):
    """Compute the target's capped logit of each row, in base 2.

    It is infinity for an ignored row, so the matmul writes p = 0. If the target is outside the vocabulary, it is the
    logit of word 0, and _cross_entropy_finish_kernel writes NaN as the loss.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets_ptr + n, n < N, other=ignore_index)
    word = tl.where((target >= 0) & (target < V), target, 0)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)[None, :]
        mask = (n[:, None] < N) & (c < C)
        x = tl.load(x_ptr + n.to(tl.int64)[:, None] * C + c, mask, other=0.0).to(tl.float32)
        products += x * tl.load(w_ptr + word[:, None] * C + c, mask, other=0.0).to(tl.float32)
    logits = tl.where(target == ignore_index, float("inf"), capped(tl.sum(products, 1), SOFTCAP) * LOG2E)
    tl.store(target_logits_ptr + n, logits, n < N)


@triton.jit
def _logits(x_ptr, w_ptr, n, v, N, V, C, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the logits of rows n and columns v, capped and in base 2, and -inf outside the matrix."""
    total = tl.zeros((n.shape[0], v.shape[0]), tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + n.to(tl.int64)[:, None] * C + c[None, :], (n[:, None] < N) & (c[None, :] < C), other=0.0)
        w = tl.load(w_ptr + v.to(tl.int64)[None, :] * C + c[:, None], (v[None, :] < V) & (c[:, None] < C), other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    return tl.where((n[:, None] < N) & (v[None, :] < V), capped(total, SOFTCAP) * LOG2E, -float("inf"))


@triton.jit(do_not_specialize=["N", "ignore_index"])
def _cross_entropy_finish_kernel(
    x_ptr,  # (N, C)
    w_ptr,  # (V, C)
    p_ptr,  # (N, V)
    targets_ptr,  # (N,) int64
    target_logits_ptr,  # (N,) fp32, capped and in base 2
    sums_ptr,  # (tiles, N) fp32
    losses_ptr,  # (N,) fp32
    scales_ptr,  # (N,) fp32: 1 / total, 0 for an ignored row
    scaled_x_ptr,  # (N, C): x times the scale
    ignore_index,
    tiles,
    N,
    V,
    C,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,  # None: no cap
):
    """Compute the losses and the scales, scale x, and subtract each row's total from its p[target]."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_bounds = n < N
    target = tl.load(targets_ptr + n, in_bounds, other=ignore_index)
    ignored, in_vocab = target == ignore_index, (target >= 0) & (target < V)
    target_logit = tl.load(target_logits_ptr + n, in_bounds, other=float("inf"))
    sums = tl.zeros((32, ROWS), tl.float32)
    for start in range(0, tiles, 32):
        i = start + tl.arange(0, 32)[:, None]
        sums += tl.load(sums_ptr + i.to(tl.int64) * N + n[None, :], (i < tiles) & in_bounds[None, :], other=0.0)
    total, shift = tl.sum(sums, 0), target_logit + HEADROOM_BITS
    large_or_nan = (total < LARGEST) == 0
    if tl.sum(large_or_nan.to(tl.int32), 0) > 0:  # compute these rows again, with their maximum as shift
        largest = tl.full((ROWS,), -float("inf"), tl.float32)
        for start in range(0, V, BLOCK):
            logits = _logits(x_ptr, w_ptr, n, start + tl.arange(0, BLOCK), N, V, C, SOFTCAP, BLOCK)
            largest = tl.maximum(largest, tl.max(logits, 1))
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            logits = _logits(x_ptr, w_ptr, n, v, N, V, C, SOFTCAP, BLOCK)
            p = tl.exp2(logits - largest[:, None])
            total += tl.sum(p, 1)
            p = times_slope_at_capped(p, logits, SOFTCAP)
            mask = in_bounds[:, None] & (v[None, :] < V)
            tl.store(p_ptr + n.to(tl.int64)[:, None] * V + v[None, :], p.to(p_ptr.dtype.element_ty), mask)
        shift = largest
        tl.debug_barrier()  # all threads must write p before one overwrites p[target]
    loss = tl.where(in_vocab, (tl.log2(total) + shift - target_logit) / LOG2E, float("nan"))
    tl.store(losses_ptr + n, tl.where(ignored, 0.0, loss), in_bounds)
    scale = tl.where(ignored, 0.0, 1.0 / total)
    tl.store(scales_ptr + n, scale, in_bounds)
    at_target = times_slope_at_capped(tl.exp2(target_logit - shift) - total, target_logit, SOFTCAP)
    at_target = at_target.to(p_ptr.dtype.element_ty)
    tl.store(p_ptr + n.to(tl.int64) * V + target, at_target, in_bounds & in_vocab & (ignored == 0))
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)[None, :]
        offsets, mask = n.to(tl.int64)[:, None] * C + c, in_bounds[:, None] & (c < C)
        x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32)
        tl.store(scaled_x_ptr + offsets, (x * scale[:, None]).to(scaled_x_ptr.dtype.element_ty), mask)


def target_logits(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, softcap: float | None = None
) -> Tensor:
    """Return the capped logit of each row's target in base 2, (N,) fp32, infinity if it is ignored.

    Tensors are contiguous.
    """
    N, C = x.shape
    logits = torch.empty(N, dtype=torch.float32, device=x.device)
    _cross_entropy_shift_kernel[(triton.cdiv(N, 4),)](
        x_ptr=x,
        w_ptr=weight,
        targets_ptr=targets,
        target_logits_ptr=logits,
        ignore_index=ignore_index,
        N=N,
        V=len(weight),
        C=C,
        ROWS=4,
        BLOCK=1024,
        SOFTCAP=softcap,
    )
    return logits


def unnormalised_gradient(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    losses: Tensor,
    ignore_index: int,
    out: Tensor,
    *,
    exponentials: Callable[..., Tensor],
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Write the losses (n,) in fp32, and p (n, V) into `out`. Return scale * x (n, C) and scale (n, 1) in fp32.

    The scale of a row is 1 / total. exponentials(x, weight, target_logits, out) is the backend's matmul: it writes p,
    and returns the sums of p's rows in each tile, (tiles along V, n) in fp32. It must take `softcap` if that is not
    None. All tensors are contiguous.
    """
    N, C = x.shape
    logits_of_targets = target_logits(x, weight, targets, ignore_index, softcap)
    sums = exponentials(x, weight, logits_of_targets, out, **softcap_argument(softcap))
    scaled_x = torch.empty_like(x)
    scales = torch.empty(N, 1, dtype=torch.float32, device=x.device)
    _cross_entropy_finish_kernel[(triton.cdiv(N, 16),)](
        x_ptr=x,
        w_ptr=weight,
        p_ptr=out,
        targets_ptr=targets,
        target_logits_ptr=logits_of_targets,
        sums_ptr=sums,
        losses_ptr=losses,
        scales_ptr=scales,
        scaled_x_ptr=scaled_x,
        ignore_index=ignore_index,
        tiles=len(sums),
        N=N,
        V=len(weight),
        C=C,
        ROWS=16,
        BLOCK=64,
        SOFTCAP=softcap,
    )
    return scaled_x, scales
