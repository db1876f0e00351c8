"""The loss of triton.py with all tokens in one chunk, for runs with memory to spare.

The price is memory. An (N, V) matrix exists until the forward ends: the exponentials of the logits. In bf16 it
has 2 N V bytes: 6.6 GB at N = 65,536 and V = 50,304.

In return one matmul computes dW and rounds it once. With chunks, every chunk reads and writes an fp32 sum of 4 V C
bytes. At C = 768 that is 2 x 155 MB for every 4,096 tokens: 4.9 GB, 1.2 ms at the copy rate of an H200. One chunk also
gives cuBLAS tall matmuls, which spread well over the multiprocessors: with chunks of 4,096 tokens, dx has only 192
tiles of 128 x 128 for 132 multiprocessors.
"""

from torch import Tensor

from kernels.gpu import check_dtypes
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.loss.triton import RUNS, apply_to_rows, detail, linear_cross_entropy  # noqa: F401


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1, softcap: float | None = None) -> Tensor:
    check_dtypes("loss", x, weight)
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index, True, softcap)  # whole: one chunk
