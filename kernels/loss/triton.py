"""LM head and cross-entropy together, a chunk of tokens at a time: the (N, V) logits never exist.

For N = 65,536 tokens and V = 50,304 the logits are 6.6 GB in bf16, and their gradient as much again. Here the forward
already computes the gradients, so that a chunk of n tokens needs one (n, V) buffer for a moment (Liger-Kernel's idea,
Hsu et al. 2024, arXiv:2410.10989):

    logits  = x W^T                    cuBLAS
    dlogits = (softmax(logits) - onehot(target)) / count, written over the logits: the kernel below
    dx      = dlogits W                cuBLAS
    dW     += dlogits^T x              cuBLAS, added up in fp32

The kernel gives a row to a program, which reads it twice: once for its maximum and its sum of exponentials together
(the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867), once to write the gradient. Crossing the memory
bus once each way is the cost, at 2 FLOP a byte: at N = 32,768 and V = 50,304 that is 6.6 GB, 1.6 ms at an H200's copy
rate, beside 11 ms for the three products. The second time a row of 100 KB should come from the L2, but most of it is
gone by then; on Hopper _gluon.py keeps it in shared memory instead.

The chunk is as large as LOGITS_BYTES allow: each chunk also reads and writes the fp32 dW once (154 MB at C = 768).
backward() only multiplies by the gradient of the loss.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import direct
from kernels.gpu import check_dtypes, triton_detail
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.loss import _gluon
from kernels.tuned import tuned

LOGITS_BYTES = 400 * 2**20  # of one chunk: 4,096 tokens at V = 50,304 in bf16
LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x log2 e), and the GPU has an instruction for 2^x
RUNS = {
    "Gluon": ("^_cross_entropy_gluon_kernel|::linear_cross_entropy",),
    "triton": ("^_cross_entropy_kernel|::linear_cross_entropy",),
}


@triton.jit
def _exp_sum(logits_ptr, columns, largest, total, V, WHOLE: tl.constexpr):
    """The online softmax's state with some more columns, all of which are below V where WHOLE."""
    real = None if WHOLE else columns < V
    other = None if WHOLE else -float("inf")
    logits = tl.load(logits_ptr + columns, real, other).to(tl.float32) * LOG2E
    before = largest
    largest = tl.maximum(largest, tl.max(logits, 0))
    return largest, total * tl.exp2(before - largest) + tl.sum(tl.exp2(logits - largest), 0)


@triton.jit
def _softmax_(logits_ptr, columns, shift, V, WHOLE: tl.constexpr):
    real = None if WHOLE else columns < V
    other = None if WHOLE else 0.0
    logits = tl.load(logits_ptr + columns, real, other).to(tl.float32)
    tl.store(logits_ptr + columns, tl.exp2(logits * LOG2E - shift).to(logits_ptr.dtype.element_ty), real)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # (n, V); where WRITE, their gradient replaces them
    targets_ptr,  # (n,) int64
    losses_ptr,  # (n,) fp32
    count_ptr,  # (1,) targets that count, of all chunks
    ignore_index,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Five instructions a logit and pass: comparing each with the target and with the row's end would be as many."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    target = tl.load(targets_ptr + row)
    counts = target != ignore_index
    exists = (target >= 0) & (target < V)
    columns = tl.arange(0, BLOCK_V)
    largest = -float("inf")
    total = 0.0
    for start in range(0, V // BLOCK_V * BLOCK_V, BLOCK_V):
        largest, total = _exp_sum(logits_ptr, start + columns, largest, total, V, True)
    if V % BLOCK_V > 0:
        largest, total = _exp_sum(logits_ptr, V // BLOCK_V * BLOCK_V + columns, largest, total, V, False)
    lse = largest + tl.log2(total)  # in base 2, as all here
    wanted = tl.load(logits_ptr + tl.where(exists, target, 0)).to(tl.float32) * LOG2E
    wanted = tl.where(exists, wanted, float("nan"))
    tl.store(losses_ptr + row, tl.where(counts, lse - wanted, 0.0) / LOG2E)
    if WRITE:
        count = tl.load(count_ptr).to(tl.float32)
        shift = tl.where(counts, lse + tl.log2(count), float("inf"))  # the gradient of an ignored row is 0
        tl.debug_barrier()  # `wanted` is read before it is overwritten
        for start in range(0, V // BLOCK_V * BLOCK_V, BLOCK_V):
            _softmax_(logits_ptr, start + columns, shift, V, True)
        if V % BLOCK_V > 0:
            _softmax_(logits_ptr, V // BLOCK_V * BLOCK_V + columns, shift, V, False)
        tl.debug_barrier()
        right = tl.exp2(wanted - shift) - 1.0 / count
        tl.store(logits_ptr + target, right.to(logits_ptr.dtype.element_ty), counts & exists)


def block(V: int) -> dict[str, int]:
    """Launch parameters for rows of V: 16 elements a thread."""
    size = min(8192, triton.next_power_of_2(V))
    return {"BLOCK_V": size, "num_warps": max(1, size // 512)}


def candidates(kernel: str, default: dict) -> list[dict]:
    """What scripts/tune.py tries. Chunks a tile or two larger, as the products' tiles may then come out even."""
    if kernel == "linear_cross_entropy":
        return [{"chunk": default["chunk"] + more} for more in (128, 256)]
    sizes = (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32)
    return [{"BLOCK_V": size, "num_warps": warps} for size, warps in sizes]


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, count: Tensor, ignore_index: int, write: bool):
    """logits (n, V), contiguous -> losses (n,) fp32; with `write` the logits become their gradient of the mean loss."""
    V = logits.shape[1]
    if write and _gluon.takes(V, logits.dtype, logits.device):
        _gluon.cross_entropy_(logits, targets, losses, count, ignore_index)
        return
    launch = tuned("cross_entropy", f"{V} {logits.dtype}", block(V), logits.device)
    _cross_entropy_kernel[(len(logits),)](logits, targets, losses, count, ignore_index, V=V, WRITE=write, **launch)


@torch.library.custom_op("hotswap::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool, whole: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, C), weight (V, C), targets (N,) -> the mean loss, fp32, and its gradients dx and dweight (or empty)."""
    (N, C), V = x.shape, len(weight)
    count = (targets != ignore_index).sum().clamp(min=1)
    losses = torch.empty(N, dtype=torch.float32, device=x.device)
    default = {"chunk": max(1, LOGITS_BYTES // (V * x.element_size()) // 128 * 128)}
    chunk = N if whole else tuned("linear_cross_entropy", f"{C} {V} {x.dtype}", default, x.device)["chunk"]
    dx = torch.empty_like(x) if gradients else x.new_empty(0)
    dweight = torch.zeros(V, C, dtype=torch.float32, device=x.device) if gradients and chunk < N else x.new_empty(0)
    buffer = x.new_empty(min(chunk, N), V)
    for part in (slice(start, start + chunk) for start in range(0, N, chunk)):
        logits = torch.mm(x[part], weight.T, out=buffer[: len(x[part])])
        cross_entropy_(logits, targets[part], losses[part], count, ignore_index, gradients)
        if not gradients:
            continue
        torch.mm(logits, weight, out=dx[part])
        if chunk >= N:  # nothing to add up: rounded once
            dweight = logits.T @ x
        elif x.dtype == torch.float32:
            dweight.addmm_(logits.T, x[part])
        else:  # cuBLAS adds bf16 products to the fp32 sum
            torch.addmm(dweight, logits.T, x[part], out_dtype=torch.float32, out=dweight)
    del logits, buffer
    return losses.sum() / count, dx, dweight.to(weight.dtype)


@linear_cross_entropy.register_fake
def outputs(x, weight, targets, ignore_index, gradients, whole=False):
    empty = x.new_empty(0)
    mean = x.new_empty((), dtype=torch.float32)
    return mean, torch.empty_like(x) if gradients else empty, torch.empty_like(weight) if gradients else empty


def setup_context(ctx, inputs, output):
    _, dx, dweight = output
    ctx.save_for_backward(dx, dweight)
    ctx.set_materialize_grads(False)  # nobody asks for those of dx and dweight


def backward(ctx, dout, _dx, _dweight):
    dx, dweight = ctx.saved_tensors
    rest = [None] * (len(ctx.needs_input_grad) - 2)
    return dx * dout.to(dx.dtype), dweight * dout.to(dweight.dtype), *rest


linear_cross_entropy = direct(linear_cross_entropy, backward, setup_context)


def loss(x, weight, targets, ignore_index=-1):
    check_dtypes("loss", x, weight)
    return apply(linear_cross_entropy, x, weight, targets, ignore_index, False)


def apply(op, x, weight, targets, ignore_index, *rest):
    """`op` over rows, with gradients where somebody will ask for them."""
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    x, targets = x.flatten(0, -2).contiguous(), targets.flatten()
    return op(x, weight, targets, ignore_index, gradients, *rest)[0]


def detail(weight, **rest) -> str:
    return triton_detail(weight=weight) + ", Gluon softmax" * _gluon.takes(len(weight), weight.dtype, weight.device)
