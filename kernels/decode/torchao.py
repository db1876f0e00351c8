"""torchao's weight-only int8: reference(), which is plain PyTorch, with matrices that torchao quantises.

Each row of a matrix has one scale: 124 MB for 124M instead of 247. Without kernels.compile=true, each product first
writes the matrix in the compute dtype, so it moves more bytes than bf16 weights. torch.compile fuses the conversion.
"""

import torch
from torch import Tensor, nn

from kernels.cache import Cache
from kernels.decode import Model, Weights, reference
from kernels.gpu import package_unavailable

COMPILES = True
LOSSY = True


def unavailable(device: torch.device) -> str | None:
    return package_unavailable("torchao", "torchao.quantization.Int8WeightOnlyConfig")


def detail() -> str:
    import torchao

    return f"int8 weights, torchao {torchao.__version__}, torch {torch.__version__}"


def quantize(weight: Tensor) -> Tensor:
    """Return a matrix (OUT, K) as torchao's int8 tensor, which F.linear takes."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module = nn.Linear(*weight.T.shape, bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    # by default the config also changes Inductor's options for the whole process
    quantize_(module, Int8WeightOnlyConfig(set_inductor_config=False))
    return module.weight


def weight_bytes(packed: Weights) -> int:
    """A byte an element: the scales, one a row, are less than 1%."""
    return sum(matrix.numel() for matrix in packed.matrices)


def pack(model: Model, cache: Cache) -> Weights:
    return model.weights().map_matrices(quantize)


def decode(packed: Weights, tokens: Tensor, cache: Cache) -> Tensor:
    return reference(packed, tokens, cache)
