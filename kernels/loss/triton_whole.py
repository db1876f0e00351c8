"""The loss of triton.py with all tokens in one chunk, for when memory is plentiful.

The (N, V) logits then exist, 2 N V bytes in bf16, 6.6 GB at N = 65,536 and V = 50,304, until the forward ends; their
gradient is written over them. In return dW is one product, rounded once: no fp32 sum of 4 V C bytes that every chunk
reads and writes. At C = 768 that is 2 x 154 MB for each 4,096 tokens: 4.9 GB, 1.2 ms at an H200's copy rate. And cuBLAS
has tall products to divide among the multiprocessors: a chunk's dx has but 192 tiles of 128 x 128 for 132 of them.
"""

from kernels.gpu import check_dtypes
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.loss.triton import RUNS, apply, detail, linear_cross_entropy  # noqa: F401


def loss(x, weight, targets, ignore_index=-1):
    check_dtypes("loss", x, weight)
    return apply(linear_cross_entropy, x, weight, targets, ignore_index, True)
