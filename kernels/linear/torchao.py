"""torchao's Float8Linear. Without fp8 it is F.linear, like eager.

Its formats are eager's: e4m3 for x and W, e5m2 for dy. Two things differ. It scales also x and dy by their largest
elements (dynamic scaling), which needs one more pass over them. And its backward never uses fast accumulation, which
eager uses for short sums (kernels/fp8.py). torch.compile fuses its passes with the ops around them, so use
kernels.compile=true.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gpu import package_unavailable
from kernels.linear import dweight_in_fp8
from kernels.registry import Unavailable

OWN_SCALES = True


def unavailable(device: torch.device) -> str | None:
    return package_unavailable("torchao", "torchao.float8.float8_linear.matmul_with_hp_or_float8_args")


def detail(fp8: bool = False, **rest: object) -> str:
    if not fp8:
        return f"torch {torch.__version__}"
    import torchao

    return f"torchao {torchao.__version__}, fp8, cuBLAS matmuls"


@functools.cache
def settings(emulate: bool, dweight: bool) -> tuple:
    """Return the last two arguments of torchao's function.

    With `emulate` the products are in fp32, for a CPU. Without `dweight`, dweight is computed in the dtype of x.
    """
    from torchao.float8.config import CastConfig, ScalingType
    from torchao.float8.float8_linear import Float8Linear, Float8LinearConfig

    operands = ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight")
    options = {} if dweight else {name: CastConfig(scaling_type=ScalingType.DISABLED) for name in operands}
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True, **options)
    layer = Float8Linear(1, 1, device="meta", config=config)
    return layer.linear_mm_config, layer.config


@torch.compiler.allow_in_graph  # Dynamo cannot trace settings(), so only AOTAutograd traces this function
def matmul_in_fp8(x: Tensor, weight: Tensor, dweight: bool) -> Tensor:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args.apply(x, weight.T, *settings(x.device.type == "cpu", dweight))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, fp8: bool = False) -> Tensor:
    if not fp8:
        return F.linear(x, weight, bias)
    if any(size % 16 for size in weight.shape):  # torchao pads only the summed dimension
        sizes = " x ".join(map(str, weight.shape))
        why = f"torchao's fp8 needs weights whose sizes are multiples of 16, not {sizes}"
        raise Unavailable(f"{why}: choose kernels.linear=eager and kernels.mlp=eager")
    y = matmul_in_fp8(x, weight, dweight_in_fp8(weight))
    return y if bias is None else y + bias
