"""Weights in int8, one scale a row: half the bytes of a step. It uses the kernels of triton.py.

A row w of a matrix becomes round(w / s) with s = max|w| / 127, symmetric and without a zero point. The kernels load the
integers, convert them to the compute dtype, which is exact, and multiply each result by its row's scale:

    y_n = s_n sum_k x_k round(w_nk / s_n)

Bytes: the matrices of 124M, with the head, have 123.6 MB instead of 247, and the scales 0.5 MB. To read them takes 30
us at 4.2 TB/s instead of 59. But it pays only for large models, because the ends of kernels cost the same, and a
conversion comes before each matmul. In generation on an H200 at batch 1, 124M makes 5,094 tokens/s (decode=triton in
bf16: 5,155), and 1558M makes 619 (543). The token embeddings stay in the compute dtype, because a step reads one row of
them a token.

Error: rounding changes a weight by at most s / 2, and by s / sqrt(12) in the root mean square. In a row of 768 normal
numbers the largest is about 3.3 standard deviations. So the error of a weight is 0.75% of the weights' standard
deviation, and the error of a result 0.75% of the results'. 124M has 49 products with independent errors. So the root
mean square error of the logits is at most about 0.75% sqrt(49) = 5% of their spread.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import Cache
from kernels.decode import Model, Weights
from kernels.decode.triton import (  # noqa: F401
    FAMILY,
    RUNS,
    check,
    decode,
    decode_token,
    detail,
    sample_tokens,
    unavailable,
)

LOSSY = True
ROWS_AT_ONCE = 4096  # quantize() needs fp32 copies of the rows; of the whole head of 124M, each would have 155 MB


class Quantized(NamedTuple):
    """A matrix as integers and scales: W = values * scale[:, None]."""

    values: Tensor  # (OUT, K) int8
    scale: Tensor  # (OUT,) fp32


def quantize(weight: Tensor) -> Quantized:
    """Round a matrix (OUT, K) to int8, with a scale for each row."""
    values, scales = [], []
    for rows in weight.split(ROWS_AT_ONCE):
        scale = rows.float().abs().amax(1) / 127
        scale = torch.where(scale == 0, 1.0, scale)  # a row with NaN keeps the scale NaN, so its results are NaN
        values.append((rows.float() / scale[:, None]).round().to(torch.int8))
        scales.append(scale)
    return Quantized(torch.cat(values), torch.cat(scales))


def pack(model: Model, cache: Cache) -> Weights:
    weights = model.weights()
    check(weights, cache)
    return weights.map_matrices(quantize)


def weight_bytes(packed: Weights) -> int:
    return sum(matrix.values.nbytes + matrix.scale.nbytes for matrix in packed.matrices)
