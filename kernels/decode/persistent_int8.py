"""The kernel of persistent.cu with weights in int8, rounded as int8.py says, which also states the error.

A step reads half the bytes. A matrix goes to the tensor cores in bf16: three or four instructions turn two integers
into bf16 (numbers.cuh), and each sum is multiplied by its row's scale. In generation on an H200 at batch 1, 124M made
7,139 tokens/s (in bf16: 6,944), and 1558M made 1,021 (906): the bytes are half, but the exchanges between blocks and
the instructions are not.
"""

from kernels.cache import Cache
from kernels.decode import Model, int8
from kernels.decode.int8 import LOSSY, quantize  # noqa: F401
from kernels.decode.persistent import (  # noqa: F401
    FAMILY,
    RUNS,
    Packed,
    decode,
    detail,
    generate_tokens,
    unavailable,
)


def pack(model: Model, cache: Cache) -> Packed:
    weights = model.weights().map_matrices(quantize)
    packed = Packed(weights, cache)
    packed.weight_bytes = int8.weight_bytes(weights)
    return packed


def weight_bytes(packed: Packed) -> int:
    return packed.weight_bytes
