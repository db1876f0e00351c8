"""torchao's linear layer in fp8 training, as in Float8Linear. Without fp8 it is one matmul of cuBLAS, like eager.

Eager's scales for x and dy are fixed. torchao scales each tensor by its own largest element (dynamic scaling), which
takes one more pass over it. Formats and products are the same: e4m3 for x and W, e5m2 for dy, torch._scaled_mm. torchao
is made for torch.compile, which fuses the passes with the ops around them, so choose kernels.compile=true.
"""

import functools
import importlib

import torch
import torch.nn.functional as F

from kernels.gpu import package_unavailable

FUNCTION = "torchao.float8.float8_linear.matmul_with_hp_or_float8_args"
OWN_SCALES = True


def unavailable(device: torch.device) -> str | None:
    return package_unavailable("torchao", FUNCTION)


def detail(fp8=False, **rest) -> str:
    return f"torchao {importlib.import_module('torchao').__version__}, fp8" if fp8 else f"torch {torch.__version__}"


@functools.cache
def settings(emulate: bool) -> tuple:
    """Return what torchao's function takes besides its tensors. With `emulate` the products are in fp32, for a CPU."""
    from torchao.float8.float8_linear import Float8Linear, Float8LinearConfig

    layer = Float8Linear(1, 1, device="meta", config=Float8LinearConfig(emulate=emulate, pad_inner_dim=True))
    return layer.linear_mm_config, layer.config


@torch.compiler.allow_in_graph  # Dynamo cannot trace settings(); AOTAutograd traces what this function does
def product(x, weight):
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args.apply(x, weight.T, *settings(emulate=x.device.type == "cpu"))


def linear(x, weight, bias, fp8=False):
    if not fp8:
        return F.linear(x, weight, bias)
    y = product(x, weight)
    return y if bias is None else y + bias
