"""QuACK's linear cross-entropy (https://github.com/Dao-AILab/quack): QuACK computes each matmul and softmax.

As in triton.py, the forward already computes the gradients, 4,096 tokens at a time. There are two ways. QuACK chooses
the first on Hopper, in bf16, if V is a multiple of 128, and a_chunk_is_square() is False:

    E       = exp(x W^T - shift)          the epilogue also sums the rows of each tile, and keeps the targets' logits
    losses, `steps`, `scale`, and a new E at each target                              two short Triton kernels
    dx      = scale ((steps E) W)         the loop of the matmul multiplies E by `steps`, powers of two
    dW     += (steps E)^T (scale x)       in fp32

Each row of a tile has its own shift. A tile has 192 columns at V = 50,304, and 256 or 128 where 192 does not divide V.
`steps` bring a row's tiles to one shift, and `scale` is one factor a row, so that scale steps E is the gradient of the
logits. E at a target becomes what gives p - 1 there. It is infinite, and the gradient NaN, if no logit in the target's
tile comes within 88 of the log-sum-exp. _unnormalised.py has the same idea with one shift for each row. Without
gradients, this way stores nothing as large as the logits.

The other way is the rest of this file: QuACK's pass over the logits between three of its matmuls. The rows have a
multiple of 8 columns, and those beyond V are -inf. In QuACK's own version, cuBLAS computes two of the matmuls.

QuACK reads and writes at the index of each target. So this file ignores a target outside the vocabulary, and makes the
loss NaN. The backward scales the gradients with PyTorch, as QuACK's does.
"""

import torch
from torch import Tensor

from kernels.direct import custom_op
from kernels.gpu import align, refused_widths
from kernels.loss._in_forward import backward, setup_context
from kernels.loss.triton import apply_to_rows, empty_outputs
from kernels.quack import MATMULS, detail, matmul  # noqa: F401
from kernels.quack import unavailable as quack_unavailable
from kernels.registry import Unavailable

CHUNK = 4096  # tokens: QuACK's default
RUNS = ("(?i)quack.*(scaled_exp|crossentropy)|quack_linear_cross_entropy",)
FAMILY = f"{MATMULS}|quack.*crossentropy|_lce_glue"
SYMBOLS = (
    "quack.cross_entropy.cross_entropy_fwd_out",
    "quack.gemm_interface.gemm_add_inplace",
    "quack.linear_cross_entropy.scaled_exp_lce_supported",
    "quack.linear_cross_entropy.scaled_exp_linear_cross_entropy_fwd",
    "quack.linear_cross_entropy._scaled_exp_lce_loss_only",
)


def unavailable(device: torch.device) -> str | None:
    return quack_unavailable(device, SYMBOLS)


def compute_loss(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses in fp32, and its gradients, for x (N, C), weight (V, C) and targets (N,).

    dx has the dtype of x, and dweight is in fp32. If gradients is False, they are empty.
    """
    from quack.linear_cross_entropy import scaled_exp_lce_supported

    x, weight = align(x), align(weight)
    in_vocab = (targets >= 0) & (targets < len(weight))
    is_right = (in_vocab | (targets == ignore_index)).all()
    targets = targets.where(in_vocab, ignore_index)
    supported = scaled_exp_lce_supported(x, weight, CHUNK, "sum") and not a_chunk_is_square(*x.shape)
    compute = exponentials_in_chunks if supported else logits_in_chunks
    losses, dx, dweight = compute(x, weight, targets, ignore_index, gradients)
    return losses.sum().where(is_right, torch.nan), dx, dweight


def a_chunk_is_square(N: int, C: int) -> bool:
    """Return whether a chunk of x (N, C) has C rows. QuACK pads the last to a multiple of 128.

    With such a chunk, QuACK 0.6.5 cannot tell a factor of each row from one of each column, and raises ValueError.
    """
    rest = N % CHUNK
    return C == CHUNK <= N or rest + -rest % 128 == C


def exponentials_in_chunks(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, dx and dweight. There may be more losses than tokens: QuACK pads with tokens whose loss is 0."""
    from quack.linear_cross_entropy import _scaled_exp_lce_loss_only, scaled_exp_linear_cross_entropy_fwd

    if not gradients:
        _, *empty = empty_outputs(x, weight, targets, ignore_index, gradients)
        return _scaled_exp_lce_loss_only(x, weight, targets, ignore_index), *empty
    losses, dx, dweight = scaled_exp_linear_cross_entropy_fwd(x, weight, targets, CHUNK, ignore_index)
    return losses, dx[: len(x)], dweight


def logits_in_chunks(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each token, dx and dweight."""
    from quack.cross_entropy import cross_entropy_fwd_out
    from quack.gemm_interface import gemm_add_inplace

    N, V = len(x), len(weight)
    losses = torch.empty(N, dtype=torch.float32, device=x.device)
    _, dx, dweight = empty_outputs(x, weight, targets, ignore_index, gradients)
    buffer = x.new_empty(min(CHUNK, N), V + -V % 8)
    for start in range(0, N, CHUNK):
        tokens = slice(start, start + CHUNK)
        padded = buffer[: len(x[tokens])]
        logits = padded[:, :V]
        matmul(x[tokens], weight.T, out=logits)
        padded[:, V:] = -torch.inf  # after the matmul: its last store has 16 bytes, and writes zeros beyond V
        # the arguments after targets: the target's logits if elsewhere, loss, log-sum-exp, gradient, weights of classes
        dlogits = padded if gradients else None
        cross_entropy_fwd_out(padded, targets[tokens], None, losses[tokens], None, dlogits, None, ignore_index)
        if not gradients:
            continue
        matmul(logits, weight, out=dx[tokens])
        if start == 0:
            matmul(logits.T, x[tokens], out=dweight)
        else:
            gemm_add_inplace(logits.T, x[tokens], dweight, tuned=False)
    return losses, dx, dweight


linear_cross_entropy = custom_op(
    "hotswap::quack_linear_cross_entropy", compute_loss, empty_outputs, backward, setup_context
)


def refusal(x: Tensor, *rest: object, **options: object) -> str | None:
    """Return what QuACK takes instead of these arguments, or None if it takes them."""
    return refused_widths(x, x.shape[-1])


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1) -> Tensor:
    if reason := refusal(x):
        raise Unavailable(f"loss=quack takes {reason}: choose kernels.loss=eager")
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index)
