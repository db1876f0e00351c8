"""The passes over the logits between the matmuls of triton.py: the loss of each row, and the gradient of the logits.

In cross_entropy_kernel a program processes one row and reads it twice. The first pass computes the maximum and the sum
of exponentials together (the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867). The second pass writes
the gradient over the logits. At 2 FLOP a byte the kernel is memory-bound, and at best it reads the logits once and
writes them once. For 65,536 tokens that is 13.2 GB, 3.2 ms at the copy rate of an H200. To reach 3.2 ms, the second
pass would have to find its row of 100 KB in the L2 cache, but most of the row has left the cache by then: the receipts
of 124M training steps show 4.7 ms. In bf16 _unnormalised.py needs no pass over the logits.

In fp8 the matmuls need the gradient by rows and by columns, so dlogits_fp8_kernel works on tiles. cross_entropy_kernel
first writes each row's loss and shift; from the shift any tile can be computed. Together they move 6 bytes a logit, and
take 5.1 ms in a step of 124M; one pass in place would move 4.
"""

import triton
import triton.language as tl

from kernels.loss._softcap import capped, times_slope
from kernels.quantize import load_rows, store_columns, store_rows, tile_of_program

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x log2(e)), because the GPU has an instruction for 2^x


@triton.jit
def _exp_sum(logits_ptr, columns, largest, total, V, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr):
    """Add columns to the online softmax: return the new maximum and sum. If WHOLE, all columns are below V."""
    mask = None if WHOLE else columns < V
    other = None if WHOLE else -float("inf")
    logits = capped(tl.load(logits_ptr + columns, mask, other).to(tl.float32), SOFTCAP) * LOG2E
    if not WHOLE and SOFTCAP is not None:  # the capped -inf is finite
        logits = tl.where(mask, logits, other)
    before = largest
    largest = tl.maximum(largest, tl.max(logits, 0))
    return largest, total * tl.exp2(before - largest) + tl.sum(tl.exp2(logits - largest), 0)


@triton.jit
def _softmax_(logits_ptr, columns, shift, V, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr):
    """Overwrite the logits with 2^(logits LOG2E - shift), and the cap's slope. If WHOLE, all columns are below V."""
    mask = None if WHOLE else columns < V
    other = None if WHOLE else 0.0
    logits = tl.load(logits_ptr + columns, mask, other).to(tl.float32)
    softmax = times_slope(tl.exp2(capped(logits, SOFTCAP) * LOG2E - shift), logits, SOFTCAP)
    tl.store(logits_ptr + columns, softmax.to(logits_ptr.dtype.element_ty), mask)


@triton.jit
def cross_entropy_kernel(
    logits_ptr,  # (n, V); with WRITE the kernel overwrites them with their gradient
    targets_ptr,  # (n,) int64
    losses_ptr,  # (n,) fp32
    shifts_ptr,  # (n,) fp32, or None; without a cap, the gradient is 2^(logits LOG2E - shift), except at the target
    ignore_index,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WRITE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # None: no cap
):
    """Compute the loss of each row, the shift for its gradient if shifts_ptr is given, and the gradient with WRITE.

    Each pass takes five instructions a logit. Comparing each column with the target and with the end of the row would
    take five more. So only the last tile has a mask, and the kernel corrects the gradient of the target's logit at the
    end.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    target = tl.load(targets_ptr + row)
    not_ignored = target != ignore_index
    in_vocab = (target >= 0) & (target < V)
    columns = tl.arange(0, BLOCK_V)
    largest = -float("inf")
    total = 0.0
    for start in range(0, V // BLOCK_V * BLOCK_V, BLOCK_V):
        largest, total = _exp_sum(logits_ptr, start + columns, largest, total, V, SOFTCAP, True)
    if V % BLOCK_V > 0:
        largest, total = _exp_sum(logits_ptr, V // BLOCK_V * BLOCK_V + columns, largest, total, V, SOFTCAP, False)
    lse = largest + tl.log2(total)  # base 2, like all exponentials and logarithms here
    uncapped = tl.load(logits_ptr + tl.where(in_vocab, target, 0)).to(tl.float32)
    target_logit = capped(uncapped, SOFTCAP) * LOG2E
    target_logit = tl.where(in_vocab, target_logit, float("nan"))
    tl.store(losses_ptr + row, tl.where(not_ignored, lse - target_logit, 0.0) / LOG2E)
    shift = tl.where(not_ignored, lse, float("inf"))  # the gradient of an ignored row is 0
    if shifts_ptr is not None:
        tl.store(shifts_ptr + row, shift)
    if WRITE:
        tl.debug_barrier()  # all threads must read `target_logit` before any thread overwrites it
        for start in range(0, V // BLOCK_V * BLOCK_V, BLOCK_V):
            _softmax_(logits_ptr, start + columns, shift, V, SOFTCAP, True)
        if V % BLOCK_V > 0:
            _softmax_(logits_ptr, V // BLOCK_V * BLOCK_V + columns, shift, V, SOFTCAP, False)
        tl.debug_barrier()
        target_grad = times_slope(tl.exp2(target_logit - shift) - 1.0, uncapped, SOFTCAP)
        tl.store(logits_ptr + target, target_grad.to(logits_ptr.dtype.element_ty), not_ignored & in_vocab)


@triton.jit
def _dlogits(logits_ptr, targets_ptr, shifts_ptr, n, v, N, V, ignore_index, scale, SOFTCAP: tl.constexpr):
    """Return rows n and columns v of the scaled gradient, and 0 outside the matrix.

    The log2 of the scale is subtracted from the shift, which saves a multiplication a logit.
    """
    logits = load_rows(logits_ptr, n, v, N, V, -float("inf"))
    targets = tl.load(targets_ptr + n, n < N, other=ignore_index)
    targets = tl.where(targets == ignore_index, -1, targets).to(tl.int32)
    shifts = tl.load(shifts_ptr + n, n < N, other=float("inf")) - tl.log2(scale)
    softmax = tl.exp2(capped(logits, SOFTCAP) * LOG2E - shifts[:, None])
    onehot = tl.where(targets[:, None] == v[None, :], scale, 0.0)
    return times_slope(softmax - onehot, logits, SOFTCAP)


@triton.jit(do_not_specialize=["N", "all_rows", "ignore_index"])  # another batch size must not recompile
def dlogits_fp8_kernel(
    logits_ptr,  # (N, V)
    targets_ptr,  # (N,) int64
    shifts_ptr,  # (N,) fp32, from cross_entropy_kernel
    scale_ptr,  # fp32
    rows_ptr,  # (N, V rounded up to a multiple of 16) in e5m2
    columns_ptr,  # (V, all_rows rounded up to a multiple of 16) in e5m2, from the first of the N rows on
    ignore_index,
    N,
    all_rows,
    V,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,  # None: no cap
):
    """Compute the gradient of the logits, 2^(logits LOG2E - shift) less 1 at the target, times scale, in both layouts.

    Of capped logits, times the slope of the cap. Without the scale it is at most 1, or NaN, so infinities need no care.
    """
    _, quads, v = tile_of_program(N, V, BLOCK_N, BLOCK_C, GROUP)
    n = 4 * quads
    scale = tl.load(scale_ptr)
    x0 = _dlogits(logits_ptr, targets_ptr, shifts_ptr, n, v, N, V, ignore_index, scale, SOFTCAP)
    x1 = _dlogits(logits_ptr, targets_ptr, shifts_ptr, n + 1, v, N, V, ignore_index, scale, SOFTCAP)
    x2 = _dlogits(logits_ptr, targets_ptr, shifts_ptr, n + 2, v, N, V, ignore_index, scale, SOFTCAP)
    x3 = _dlogits(logits_ptr, targets_ptr, shifts_ptr, n + 3, v, N, V, ignore_index, scale, SOFTCAP)
    store_rows(x0, x1, x2, x3, rows_ptr, quads, v, N, V)
    store_columns(x0, x1, x2, x3, columns_ptr, quads, v, N, V, all_rows)


@triton.jit
def scale_kernel(
    x_ptr,  # (n,)
    factor_ptr,  # (1,) fp32
    out_ptr,  # (n,)
    n,  # Triton loads 16 bytes at once only if it knows that n is a multiple of 16
    BLOCK: tl.constexpr,
):
    """Multiply x by the factor in fp32, and round once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n).to(tl.float32) * tl.load(factor_ptr)
    tl.store(out_ptr + i, x.to(out_ptr.dtype.element_ty), i < n)
