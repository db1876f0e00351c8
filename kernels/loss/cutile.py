"""LM head and cross-entropy in cuTile, a chunk of tokens at a time: the idea of triton.py, in NVIDIA's tile language.

The forward already computes the gradients, so of the (N, V) logits only those of a chunk exist, in one buffer:

    logits  = x W^T                                a matmul, which also writes log2(sum(exp(logit))) of a tile's rows
    losses, and lse of each row                    from these sums, 393 a row at V = 50,304, and the target's logit
    dlogits = exp(logits - lse) - onehot(target)   in place; a block has one tile
    dx      = dlogits W                            with the loops of kernels/linear/_cutile.py
    dW     += dlogits^T x                          the same; the L2 cache adds in fp32

The softmax is that of the rounded logits, as in eager.py, in every dtype. _unnormalised.py needs no pass over the
logits, but it works only in bf16, and must compute rows with a large loss again. Here the first matmul sums each row,
so only the pass dlogits remains. An element of dW belongs to one block of a launch, so two calls give the same bits.

At 32,768 tokens of 768 channels and V = 50,304 the three matmuls are 7.6 TFLOP, and bare they take cuBLAS 10.1 ms on an
H200. The logits move five times, 16.5 GB. The matmuls move 9.9 GB of them while they compute. dlogits moves 6.6 GB,
1.6 ms at the copy rate. A chunk has 5,632 tokens, so dx has 44 x 3 tiles, one for each multiprocessor, and each chunk
adds 155 MB to dW.

For Hopper, tileiras 13.5 overlaps the wgmma of all three matmuls, as in linear/cutile.py, also with the sums of the
first and with TMA's addition to dW. dlogits loads and stores 16 bytes a thread. If C and V are multiples of 8, nothing
spills in 16 bits. On an H200 the loss and its gradients take 13.6 ms, and 11.0 with loss=triton (commit 3389580).

dx and dW are gradients of the sum of the losses, which PyTorch scales in the backward. fp8 is not supported.
"""

import torch
import triton
from torch import Tensor

from kernels.cutile import detail, launch, unavailable  # noqa: F401
from kernels.direct import custom_op
from kernels.gpu import DTYPES, multiprocessors, unsupported_dtype
from kernels.linear.cutile import GROUP, tile_of
from kernels.loss._in_forward import backward, setup_context
from kernels.loss.triton import apply_to_rows, empty_outputs
from kernels.registry import Unavailable

LOGITS_BYTES = 544 * 2**20  # of one chunk: 5,632 tokens at V = 50,304 in bf16
RUNS = ("cutile_cross_entropy|cutile_linear_cross_entropy",)
FAMILY = "cutile_cross_entropy"
ROWS = 8  # tokens of a block that adds the tiles' sums: 32 bytes of each tile
TILE = 32, 256  # tokens and words of a tile of dlogits


def write_losses(
    x: Tensor, weight: Tensor, targets: Tensor, losses: Tensor, logits: Tensor, ignore_index: int, softcap: float | None
) -> Tensor:
    """Write the losses (n,) in fp32, and the logits (n, V) before the cap.

    Return lse for write_gradient(): log2 of each row's sum of exponentials, (n,) in fp32, infinity for an ignored row.
    """
    from kernels.loss._cutile import cutile_cross_entropy_logits, cutile_cross_entropy_loss

    N, V = logits.shape
    n, v, c = tile_of(x.dtype, V)
    tiles = triton.cdiv(V, v)
    tile_lse, lse = losses.new_empty(tiles, N), losses.new_empty(N)
    launch(
        cutile_cross_entropy_logits,
        (min(triton.cdiv(N, n) * tiles, multiprocessors(x.device)),),
        x=x,
        w=weight,
        logits=logits,
        tile_lse=tile_lse,
        softcap=softcap or 1.0,
        BLOCK_N=n,
        BLOCK_V=v,
        BLOCK_C=c,
        GROUP=GROUP,
        CAPPED=softcap is not None,
    )
    launch(
        cutile_cross_entropy_loss,
        (triton.cdiv(N, ROWS),),
        logits=logits,
        tile_lse=tile_lse,
        targets=targets,
        losses=losses,
        lse=lse,
        ignore_index=ignore_index,
        softcap=softcap or 1.0,
        TILES=triton.next_power_of_2(tiles),
        ROWS=ROWS,
        CAPPED=softcap is not None,
    )
    return lse


def write_gradient(logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int, softcap: float | None) -> None:
    """Overwrite the logits (n, V) with the gradient of the sum of the losses."""
    from kernels.loss._cutile import cutile_cross_entropy_gradient

    N, V = logits.shape
    rows, columns = TILE
    launch(
        cutile_cross_entropy_gradient,
        (triton.cdiv(V, columns), triton.cdiv(N, rows)),
        logits=logits,
        targets=targets,
        lse=lse,
        ignore_index=ignore_index,
        softcap=softcap or 1.0,
        ROWS=rows,
        COLUMNS=columns,
        CAPPED=softcap is not None,
    )


def multiply(dlogits: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dweight: Tensor, add: bool) -> None:
    """Write dx (n, C), and dweight (V, C) in fp32; with `add`, add to dweight."""
    from kernels.loss._cutile import cutile_cross_entropy_dweight, cutile_cross_entropy_dx

    (N, V), C = dlogits.shape, x.shape[1]
    rows, columns, depth = tile_of(x.dtype, C)
    launch(
        cutile_cross_entropy_dx,
        (min(triton.cdiv(N, rows) * triton.cdiv(C, columns), multiprocessors(x.device)),),
        d=dlogits,
        w=weight,
        dx=dx,
        BLOCK_N=rows,
        BLOCK_C=columns,
        BLOCK_V=depth,
        GROUP=GROUP,
    )
    launch(
        cutile_cross_entropy_dweight,
        (triton.cdiv(V, rows) * triton.cdiv(C, columns),),
        d=dlogits,
        x=x,
        dweight=dweight,
        BLOCK_N=depth,
        BLOCK_V=rows,
        BLOCK_C=columns,
        GROUP=GROUP,
        ADD=add,
    )


def compute_loss(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses and its gradients, as linear_cross_entropy() of triton.py does."""
    N, V = len(x), len(weight)
    chunk = max(1, LOGITS_BYTES // (V * x.element_size()) // 128 * 128)
    losses = torch.empty(N, dtype=torch.float32, device=x.device)
    _, dx, dweight = empty_outputs(x, weight, targets, ignore_index, gradients)
    buffer = x.new_empty(min(chunk, N), V + -V % 8)[:, :V]  # TMA needs rows of a multiple of 16 bytes
    for start in range(0, N, chunk):
        tokens = slice(start, start + chunk)
        logits = buffer[: len(x[tokens])]
        lse = write_losses(x[tokens], weight, targets[tokens], losses[tokens], logits, ignore_index, softcap)
        if gradients:
            write_gradient(logits, targets[tokens], lse, ignore_index, softcap)
            multiply(logits, x[tokens], weight, dx[tokens], dweight, add=start > 0)
    return losses.sum(), dx, dweight


linear_cross_entropy = custom_op(
    "hotswap::cutile_linear_cross_entropy", compute_loss, empty_outputs, backward, setup_context
)


def refusal(x: Tensor, weight: Tensor, *rest: object, **options: object) -> str | None:
    """Return what the kernels take instead of these arguments, or None if they take them."""
    return unsupported_dtype(DTYPES, x, weight)


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1, softcap: float | None = None) -> Tensor:
    if reason := refusal(x, weight):
        raise Unavailable(f"loss=cutile takes {reason}: choose kernels.loss=eager")
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index, softcap)
