"""The MLP with its six products in fp8, around the two lines that a backend computes.

    forward   pass     x, W_fc and W_proj to e4m3, by rows and by columns     (kernels/quantize.py; norm=triton for x)
              backend  h = x W_fc^T + b_fc, in the compute dtype; a = gelu(h) in e4m3 by rows
              cuBLAS   y = a W_proj^T + b_proj
    backward  pass     dy to e5m2, by rows and by columns; db_proj
              backend  da = dy W_proj; dh = da gelu'(h) in e5m2, by rows and by columns; db_fc; a again, by columns
              cuBLAS   dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x

Autograd saves h, and in fp8 by columns x and both weights. The backward recomputes a, because it reads h anyway, so a
by columns is not saved. The backend brings two functions:

    fc_and_gelu(x, w, w_unit, bias, a, dtype) -> h                          writes a by rows, (N, F)
    proj_and_gelu_backward(dy, w, w_unit, h, a, dh, dh_columns, sums)       writes a and dh_columns by columns, (F, N),
                                                                            and dh by rows

In fp8 are x (N, C), w (F, C), which is W_fc or W_proj by columns, dy (N, C), and a and dh. `w_unit` is 1 / the scale of
w. h (N, F) is in `dtype`. If `sums` is true, the second function returns partial sums of dh's rows (parts, F) in fp32.
In the op glu, h and dh have 2 F columns, W_fc has 2 F rows, and a is silu(gate) up.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.fp8 import E4M3, E5M2, X_SCALE, InFp8, product
from kernels.quantize import dy_scale, empty_fp8, matrix_and_layouts, quantize, quantize_weight, unit_tensor
from kernels.sums import add_partial_sums


def define_mlp(name: str, fc_and_gelu: Callable, proj_and_gelu_backward: Callable) -> Callable:
    """Define the operators hotswap::NAME_fwd and hotswap::NAME_bwd, and return mlp() in fp8."""

    def launch_forward(
        x: Tensor,
        w_fc: Tensor,
        b_fc: Tensor | None,
        w_proj: Tensor,
        b_proj: Tensor | None,
        x_rows: Tensor,
        x_columns: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return y (N, C), and for the backward h (N, F), and each weight by columns with its unit.

        See matrix_and_layouts() for x.
        """
        fc_rows, fc_columns, fc_unit = quantize_weight(w_fc)
        proj_rows, proj_columns, proj_unit = quantize_weight(w_proj)
        a = empty_fp8(len(x), w_proj.shape[1], E4M3, x.device)
        h = fc_and_gelu(x_rows, fc_rows, fc_unit, b_fc, a, x.dtype)
        y = product(a, proj_rows, (unit_tensor(X_SCALE, x.device), proj_unit), x.dtype, b_proj)
        return y, h, fc_columns, fc_unit, proj_columns, proj_unit

    def empty_outputs(
        x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, *_: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        fc_columns, proj_columns = (empty_fp8(*weight.T.shape, E4M3, x.device) for weight in (w_fc, w_proj))
        fc_unit, proj_unit = (x.new_empty((), dtype=torch.float32) for _ in range(2))
        # not len(x): it would be a number, and torch.compile would compile each length
        h = x.new_empty(x.shape[0], w_fc.shape[0])
        return x.new_empty(x.shape), h, fc_columns, fc_unit, proj_columns, proj_unit

    def launch_backward(
        dy: Tensor,
        h: Tensor,
        b_fc: Tensor | None,
        b_proj: Tensor | None,
        x_columns: Tensor,
        fc_columns: Tensor,
        fc_unit: Tensor,
        proj_columns: Tensor,
        proj_unit: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return dx, dw_fc, db_fc, dw_proj and db_proj. If a bias is missing, its gradient is empty."""
        (N, rows), F = h.shape, proj_columns.shape[0]
        unit, x_unit = (unit_tensor(scale, dy.device) for scale in (dy_scale(N), X_SCALE))
        dy_rows, dy_columns, db_proj = quantize(dy, unit, E5M2, sums=b_proj is not None)
        a_columns, dh_columns = empty_fp8(F, N, E4M3, dy.device), empty_fp8(rows, N, E5M2, dy.device)
        dh = empty_fp8(N, rows, E5M2, dy.device)
        operands = dy_rows, proj_columns, proj_unit, h
        partial = proj_and_gelu_backward(*operands, a_columns, dh, dh_columns, sums=b_fc is not None)
        del operands, dy_rows
        db_fc = h.new_empty(0) if b_fc is None else add_partial_sums(partial, h.dtype)
        dw_proj = product(dy_columns, a_columns, (unit, x_unit), dy.dtype)
        dx = product(dh, fc_columns, (unit, fc_unit), dy.dtype)
        dw_fc = product(dh_columns, x_columns, (unit, x_unit), dy.dtype)
        return dx, dw_fc, db_fc, dw_proj, db_proj

    def empty_mlp_gradients(
        dy: Tensor,
        h: Tensor,
        b_fc: Tensor | None,
        b_proj: Tensor | None,
        x_columns: Tensor,
        fc_columns: Tensor,
        fc_unit: Tensor,
        proj_columns: Tensor,
        _: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        C = dy.shape[1]
        dx, db_fc, db_proj = empty_gradients(dy, b_fc, b_proj)
        return dx, dy.new_empty(h.shape[1], C), db_fc, dy.new_empty(C, proj_columns.shape[0]), db_proj

    def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        _, _, b_fc, _, b_proj, _, x_columns = inputs
        _, h, *weights = output
        ctx.save_for_backward(h, b_fc, b_proj, x_columns, *weights)
        ctx.set_materialize_grads(False)  # only y has a gradient

    def backward(ctx: FunctionCtx, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return *mlp_bwd(dy.contiguous(), *ctx.saved_tensors), None, None

    mlp_bwd = custom_op(f"hotswap::{name}_bwd", launch_backward, empty_mlp_gradients)
    mlp_fwd = custom_op(f"hotswap::{name}_fwd", launch_forward, empty_outputs, backward, setup_context)

    def mlp(x: Tensor | InFp8, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
        matrix, rows, columns = matrix_and_layouts(x)
        y, *_ = mlp_fwd(matrix, w_fc, b_fc, w_proj, b_proj, rows, columns)
        return y.view(x.shape)

    return mlp
