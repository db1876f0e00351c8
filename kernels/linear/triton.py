"""Three matmuls in Triton (kernels/matmul.py), of which the first adds the bias in its epilogue.

    forward   y = x W^T + b
    backward  dx = dy W, dW = dy^T x, and db, the sum of dy's rows (kernels/sums.py)

With fp8, cuBLAS multiplies, and one pass rounds each operand for all of its products:

    forward   pass     x and W to e4m3, by rows and by columns       (kernels/quantize.py; norm=triton does it for x)
              cuBLAS   y = x W^T + b
    backward  pass     dy to e5m2, by rows and by columns, and its sum db
              cuBLAS   dx = dy W, dW = dy^T x

For a square W, dW is not in fp8, so x and dy are not stored by columns, and autograd keeps x, which attention keeps
anyway: at 124M with 64 x 1024 tokens this saves 0.6 GB.

In eager PyTorch each operand is rounded by rows, and transposed in a pass of its own.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op
from kernels.fp8 import E4M3, E5M2, X_SCALE, InFp8, product
from kernels.gpu import check_dtypes, triton_and_cublas_detail, triton_detail
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.linear import dweight_in_fp8
from kernels.linear._op import define_linear
from kernels.matmul import candidates as matmul_candidates
from kernels.matmul import matmul, matmul_transposed
from kernels.quantize import candidates as quantize_candidates
from kernels.quantize import dy_scale, empty_fp8, matrix_and_layouts, quantize, quantize_weight, unit_tensor
from kernels.sums import sum_rows

RUNS = {"fp8": ("^_quantize_kernel|::linear_fp8",), "triton": ("^_tiled_matmul_kernel|::linear_fwd",)}
INPUT_IN_FP8 = True
FAMILY = "^_(tiled|split)_matmul|^_quantize_kernel|^_maxima_kernel|_sum_rows_kernel"  # also of the MLP and the loss


def detail(x: Tensor, fp8: bool = False, **rest: object) -> str:
    return triton_and_cublas_detail(x=x, fp8=True) if fp8 else triton_detail(x=x)


def candidates(kernel: str, default: dict) -> list[dict]:
    return quantize_candidates() if kernel == "quantize" else matmul_candidates(kernel, default)


def launch_fp8_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_rows: Tensor, x_columns: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (N, F), and for the backward the weight by columns, (C, F), and its unit.

    See matrix_and_layouts() for x.
    """
    weight_rows, weight_columns, weight_unit = quantize_weight(weight)
    y = product(x_rows, weight_rows, (unit_tensor(X_SCALE, x.device), weight_unit), x.dtype, bias)
    return y, weight_columns, weight_unit


def empty_fp8_outputs(x: Tensor, weight: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    F, C = weight.shape
    return x.new_empty(x.shape[0], F), empty_fp8(C, F, E4M3, x.device), x.new_empty((), dtype=torch.float32)


def launch_fp8_backward(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, x_columns: Tensor, weight_columns: Tensor, weight_unit: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (N, C), dweight (F, C) and dbias (F,). Without a bias, dbias is empty.

    If x (N, C) is given, dweight is not in fp8.
    """
    unit, x_unit = (unit_tensor(scale, dy.device) for scale in (dy_scale(len(dy)), X_SCALE))
    dy_rows, dy_columns, dbias = quantize(dy, unit, E5M2, columns=x is None, sums=bias is not None)
    dx = product(dy_rows, weight_columns, (unit, weight_unit), dy.dtype)
    dweight = product(dy_columns, x_columns, (unit, x_unit), dy.dtype) if x is None else dy.T @ x
    return dx, dweight, dbias


def empty_fp8_gradients(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, x_columns: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    (N, F), C = dy.shape, x_columns.shape[0]
    return dy.new_empty(N, C), dy.new_empty(F, C), dy.new_empty(0 if bias is None else F)


def _setup_fp8_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, _, x_columns = inputs
    ctx.save_for_backward(None if dweight_in_fp8(weight) else x, bias, x_columns, *output[1:])
    ctx.set_materialize_grads(False)  # only y has a gradient


def _fp8_backward(ctx: FunctionCtx, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *linear_fp8_bwd(dy.contiguous(), *ctx.saved_tensors), None, None


linear_fp8_bwd = custom_op("hotswap::linear_fp8_bwd", launch_fp8_backward, empty_fp8_gradients)
linear_fp8_fwd = custom_op(
    "hotswap::linear_fp8_fwd", launch_fp8_forward, empty_fp8_outputs, _fp8_backward, _setup_fp8_context
)


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return matmul("linear_fwd", x, weight, bias)


def launch_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (N, C), dweight (F, C) and dbias (F,). Without a bias, dbias is empty."""
    dx, dweight = matmul("linear_dx", dy, weight, w_by_rows=False), matmul_transposed("linear_dw", dy, x)
    return dx, dweight, dy.new_empty(0) if bias is None else sum_rows(dy)


unquantized_linear = define_linear("linear", launch_forward, launch_backward)


def linear(x: Tensor | InFp8, weight: Tensor, bias: Tensor | None, fp8: bool = False) -> Tensor:
    check_dtypes("linear", x, weight, fp8=fp8)
    if not fp8:
        return unquantized_linear(x, weight, bias)
    if isinstance(x, InFp8) and not dweight_in_fp8(weight):
        raise ValueError(f"linear=triton: dweight of a square weight ({len(weight)}) needs x itself, not x in fp8")
    matrix, rows, columns = matrix_and_layouts(x, columns=dweight_in_fp8(weight))
    y, *_ = linear_fp8_fwd(matrix, weight, bias, rows, columns)
    return y.view(*x.shape[:-1], len(weight))
