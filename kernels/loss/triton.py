"""LM head and cross-entropy together, one chunk of tokens at a time, so that the (N, V) logits never exist.

For N = 65,536 tokens and V = 50,304 the logits are 6.6 GB in bf16, and their gradient is as large. This file uses the
idea of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989): the forward already computes the gradients, so a chunk of n
tokens needs one (n, V) buffer, and only until its gradients are done.

    logits  = x W^T                                            cuBLAS
    dlogits = (softmax(logits) - onehot(target)) / count       the kernel below, written over the logits
    dx      = dlogits W                                        cuBLAS
    dW     += dlogits^T x                                      cuBLAS, summed in fp32

In the kernel a program processes one row and reads it twice. The first pass computes the maximum and the sum of
exponentials together (the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867). The second pass writes the
gradient. At 2 FLOP a byte the kernel is memory-bound, and at best it reads the logits once and writes them once. For
65,536 tokens that is 13.2 GB, 3.2 ms at the copy rate of an H200. To reach 3.2 ms, the second pass would have to find
its row of 100 KB in the L2 cache, but most of the row has left the cache by then: the receipts of 124M training steps
show 4.7 ms. On Hopper _gluon.py keeps the row in shared memory instead, and the receipts show 3.3 ms.

A chunk has as many tokens as LOGITS_BYTES allows, because every chunk also reads and writes the fp32 dW once (155 MB at
C = 768). backward() only multiplies dx and dW by the gradient of the loss.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import bypass_dispatcher
from kernels.gpu import check_dtypes, triton_detail
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.loss import _gluon
from kernels.tuned import launch_parameters

LOGITS_BYTES = 400 * 2**20  # the size of one chunk's logits: 4,096 tokens at V = 50,304 in bf16
LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x log2(e)), because the GPU has an instruction for 2^x
RUNS = {
    "Gluon": ("^_cross_entropy_gluon_kernel|::linear_cross_entropy",),
    "triton": ("^_cross_entropy_kernel|::linear_cross_entropy",),
}


@triton.jit
def _exp_sum(logits_ptr, columns, largest, total, V, WHOLE: tl.constexpr):
    """Add columns to the online softmax: return the new maximum and sum. If WHOLE, all columns are below V."""
    mask = None if WHOLE else columns < V
    other = None if WHOLE else -float("inf")
    logits = tl.load(logits_ptr + columns, mask, other).to(tl.float32) * LOG2E
    before = largest
    largest = tl.maximum(largest, tl.max(logits, 0))
    return largest, total * tl.exp2(before - largest) + tl.sum(tl.exp2(logits - largest), 0)


@triton.jit
def _softmax_(logits_ptr, columns, shift, V, WHOLE: tl.constexpr):
    """Overwrite the logits with 2^(logits LOG2E - shift). If WHOLE, all columns are below V."""
    mask = None if WHOLE else columns < V
    other = None if WHOLE else 0.0
    logits = tl.load(logits_ptr + columns, mask, other).to(tl.float32)
    tl.store(logits_ptr + columns, tl.exp2(logits * LOG2E - shift).to(logits_ptr.dtype.element_ty), mask)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # (n, V); with WRITE the kernel overwrites them with their gradient
    targets_ptr,  # (n,) int64
    losses_ptr,  # (n,) fp32
    count_ptr,  # (1,) number of targets other than ignore_index, in all chunks
    ignore_index,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Compute the loss of each row and, with WRITE, the gradient of its logits.

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
        largest, total = _exp_sum(logits_ptr, start + columns, largest, total, V, True)
    if V % BLOCK_V > 0:
        largest, total = _exp_sum(logits_ptr, V // BLOCK_V * BLOCK_V + columns, largest, total, V, False)
    lse = largest + tl.log2(total)  # base 2, like all exponentials and logarithms here
    target_logit = tl.load(logits_ptr + tl.where(in_vocab, target, 0)).to(tl.float32) * LOG2E
    target_logit = tl.where(in_vocab, target_logit, float("nan"))
    tl.store(losses_ptr + row, tl.where(not_ignored, lse - target_logit, 0.0) / LOG2E)
    if WRITE:
        count = tl.load(count_ptr).to(tl.float32)
        shift = tl.where(not_ignored, lse + tl.log2(count), float("inf"))  # the gradient of an ignored row is 0
        tl.debug_barrier()  # all threads must read `target_logit` before any thread overwrites it
        for start in range(0, V // BLOCK_V * BLOCK_V, BLOCK_V):
            _softmax_(logits_ptr, start + columns, shift, V, True)
        if V % BLOCK_V > 0:
            _softmax_(logits_ptr, V // BLOCK_V * BLOCK_V + columns, shift, V, False)
        tl.debug_barrier()
        target_grad = tl.exp2(target_logit - shift) - 1.0 / count
        tl.store(logits_ptr + target, target_grad.to(logits_ptr.dtype.element_ty), not_ignored & in_vocab)


def softmax_launch(V: int) -> dict[str, int]:
    """Return the kernel's launch parameters for rows of width V: 16 elements a thread."""
    columns = min(8192, triton.next_power_of_2(V))
    return {"BLOCK_V": columns, "num_warps": max(1, columns // 512)}


def candidates(kernel: str, default: dict) -> list[dict]:
    """Return the launch parameters that scripts/tune.py tries for `kernel`.

    For the chunk it tries one or two more tiles of 128 tokens, because the tiles of the matmuls may then divide evenly
    among the multiprocessors.
    """
    if kernel == "linear_cross_entropy":
        return [{"chunk": default["chunk"] + more} for more in (128, 256)]
    choices = (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32)
    return [{"BLOCK_V": columns, "num_warps": warps} for columns, warps in choices]


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, count: Tensor, ignore_index: int, write: bool):
    """Write the losses (n,) in fp32 of contiguous logits (n, V).

    If write is True, also overwrite the logits with their gradient. This is the gradient of the mean loss over all
    `count` targets other than ignore_index. `count` is a tensor, so that the host does not wait for it.
    """
    V = logits.shape[1]
    if write and _gluon.supports(V, logits.dtype, logits.device):
        _gluon.cross_entropy_(logits, targets, losses, count, ignore_index)
        return
    launch = launch_parameters("cross_entropy", f"{V} {logits.dtype}", softmax_launch(V), logits.device)
    _cross_entropy_kernel[(len(logits),)](logits, targets, losses, count, ignore_index, V=V, WRITE=write, **launch)


@torch.library.custom_op("hotswap::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool, whole: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss in fp32 and its gradients dx and dweight for x (N, C), weight (V, C) and targets (N,).

    If gradients is False, dx and dweight are empty. If whole is True, all tokens are one chunk.
    """
    (N, C), V = x.shape, len(weight)
    count = (targets != ignore_index).sum().clamp(min=1)
    losses = torch.empty(N, dtype=torch.float32, device=x.device)
    default = {"chunk": max(1, LOGITS_BYTES // (V * x.element_size()) // 128 * 128)}
    chunk = N if whole else launch_parameters("linear_cross_entropy", f"{C} {V} {x.dtype}", default, x.device)["chunk"]
    dx = torch.empty_like(x) if gradients else x.new_empty(0)
    dweight = torch.zeros(V, C, dtype=torch.float32, device=x.device) if gradients and chunk < N else x.new_empty(0)
    buffer = x.new_empty(min(chunk, N), V)
    for start in range(0, N, chunk):
        tokens = slice(start, start + chunk)
        logits = torch.mm(x[tokens], weight.T, out=buffer[: len(x[tokens])])
        cross_entropy_(logits, targets[tokens], losses[tokens], count, ignore_index, gradients)
        if not gradients:
            continue
        torch.mm(logits, weight, out=dx[tokens])  # `logits` now holds their gradient
        if chunk >= N:  # one chunk needs no sum in fp32
            dweight = logits.T @ x
        elif x.dtype == torch.float32:
            dweight.addmm_(logits.T, x[tokens])
        else:  # cuBLAS adds a product of bf16 matrices to the fp32 sum
            torch.addmm(dweight, logits.T, x[tokens], out_dtype=torch.float32, out=dweight)
    del logits, buffer  # free them before dweight is cast
    return losses.sum() / count, dx, dweight.to(weight.dtype)


@linear_cross_entropy.register_fake
def empty_outputs(x, weight, targets, ignore_index, gradients, whole=False):
    """Allocate what linear_cross_entropy() returns: the operator's fake implementation, here and in liger.py."""
    empty = x.new_empty(0)
    mean = x.new_empty((), dtype=torch.float32)
    return mean, torch.empty_like(x) if gradients else empty, torch.empty_like(weight) if gradients else empty


def setup_context(ctx, inputs, output):
    _, dx, dweight = output
    ctx.save_for_backward(dx, dweight)
    ctx.set_materialize_grads(False)  # the outputs dx and dweight get no gradients


def backward(ctx, dout, _dx, _dweight):
    dx, dweight = ctx.saved_tensors
    no_gradients = [None] * (len(ctx.needs_input_grad) - 2)
    return dx * dout.to(dx.dtype), dweight * dout.to(dweight.dtype), *no_gradients


linear_cross_entropy = bypass_dispatcher(linear_cross_entropy, backward, setup_context)


def loss(x, weight, targets, ignore_index=-1):
    check_dtypes("loss", x, weight)
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index, False)  # whole=False: in chunks


def apply_to_rows(op, x, weight, targets, ignore_index, *options):
    """Call `op` with x as (N, C) and return the loss. `op` computes gradients only if autograd will need them.

    `options` are further arguments of `op`: `whole` for linear_cross_entropy(), none for Liger's operator.
    """
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    x, targets = x.flatten(0, -2).contiguous(), targets.flatten()
    mean_loss, _, _ = op(x, weight, targets, ignore_index, gradients, *options)
    return mean_loss


def detail(weight, **rest) -> str:
    text = triton_detail(weight=weight)
    return f"{text}, Gluon softmax" if _gluon.supports(len(weight), weight.dtype, weight.device) else text
