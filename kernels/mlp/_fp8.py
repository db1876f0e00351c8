"""The MLP with its six products in fp8, around the two lines that a backend computes.

    forward   pass     x, W_fc and W_proj to e4m3, by rows and by columns     (kernels/quantize.py; norm=triton for x)
              backend  h = x W_fc^T + b_fc, in the compute dtype; a = gelu(h) in e4m3 by rows
              cuBLAS   y = a W_proj^T + b_proj
    backward  pass     dy to e5m2, by rows and by columns; db_proj
              backend  da = dy W_proj; dh = da gelu'(h) in e5m2, by rows and by columns; db_fc; a again, by columns
              cuBLAS   dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x

Autograd saves h, and in fp8 by columns x and both weights. The backward computes a again, because it reads h anyway, so
a by columns is not saved. The backend brings two functions:

    fc_and_gelu(x, w, w_unit, bias, dtype) -> h, a
    proj_and_gelu_backward(dy, w, w_unit, h, sums) -> a, dh, dh_columns, partial

In fp8 are x (N, C), w (F, C), which is W_fc or W_proj by columns, dy (N, C), and a and dh. `w_unit` is 1 / the scale of
w. h (N, F) is in `dtype`. The forward's a is by rows (N, F), the backward's by columns (F, N). `partial` are partial
sums of dh's rows (parts, F) in fp32 if `sums` is true, otherwise None.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import bypass_dispatcher
from kernels.fp8 import E4M3, E5M2, X_SCALE, InFp8, product
from kernels.quantize import dy_scale, empty_fp8, matrix_and_layouts, quantize, quantize_weight, unit_tensor
from kernels.sums import add_partial_sums


def define_mlp(name: str, fc_and_gelu: Callable, proj_and_gelu_backward: Callable) -> Callable:
    """Define the operators hotswap::NAME_fwd and hotswap::NAME_bwd, and return mlp() in fp8."""

    @torch.library.custom_op(f"hotswap::{name}_fwd", mutates_args=())
    def mlp_fwd(
        x: Tensor,
        x_rows: Tensor,
        x_columns: Tensor,
        w_fc: Tensor,
        b_fc: Tensor | None,
        w_proj: Tensor,
        b_proj: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return y (N, C), and for the backward h (N, F), and each weight by columns with its unit.

        See matrix_and_layouts() for x.
        """
        fc_rows, fc_columns, fc_unit = quantize_weight(w_fc)
        proj_rows, proj_columns, proj_unit = quantize_weight(w_proj)
        h, a = fc_and_gelu(x_rows, fc_rows, fc_unit, b_fc, x.dtype)
        y = product(a, proj_rows, (unit_tensor(X_SCALE, x.device), proj_unit), x.dtype, b_proj)
        return y, h, fc_columns, fc_unit, proj_columns, proj_unit

    @mlp_fwd.register_fake
    def _(
        x: Tensor, x_rows: Tensor, x_columns: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, *_: object
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        fc_columns, proj_columns = (empty_fp8(*weight.T.shape, E4M3, x.device) for weight in (w_fc, w_proj))
        fc_unit, proj_unit = (x.new_empty((), dtype=torch.float32) for _ in range(2))
        # not len(x): it would be a number, and torch.compile would compile each length
        h = x.new_empty(x.shape[0], w_fc.shape[0])
        return x.new_empty(x.shape), h, fc_columns, fc_unit, proj_columns, proj_unit

    @torch.library.custom_op(f"hotswap::{name}_bwd", mutates_args=())
    def mlp_bwd(
        dy: Tensor,
        h: Tensor,
        x_columns: Tensor,
        fc_columns: Tensor,
        fc_unit: Tensor,
        proj_columns: Tensor,
        proj_unit: Tensor,
        has_b_fc: bool,
        has_b_proj: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return dx, dw_fc, db_fc, dw_proj and db_proj. If a bias is missing, its gradient is empty."""
        unit, x_unit = (unit_tensor(scale, dy.device) for scale in (dy_scale(len(dy)), X_SCALE))
        dy_rows, dy_columns, db_proj = quantize(dy, unit, E5M2, sums=has_b_proj)
        a_columns, dh_rows, dh_columns, partial = proj_and_gelu_backward(dy_rows, proj_columns, proj_unit, h, has_b_fc)
        del dy_rows
        db_fc = add_partial_sums(partial, h.dtype) if has_b_fc else h.new_empty(0)
        dw_proj = product(dy_columns, a_columns, (unit, x_unit), dy.dtype)
        dx = product(dh_rows, fc_columns, (unit, fc_unit), dy.dtype)
        dw_fc = product(dh_columns, x_columns, (unit, x_unit), dy.dtype)
        return dx, dw_fc, db_fc, dw_proj, db_proj

    @mlp_bwd.register_fake
    def _(
        dy: Tensor,
        h: Tensor,
        x_columns: Tensor,
        fc_columns: Tensor,
        fc_unit: Tensor,
        proj_columns: Tensor,
        proj_unit: Tensor,
        has_b_fc: bool,
        has_b_proj: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        C, F = dy.shape[1], h.shape[1]
        db_fc, db_proj = dy.new_empty(F if has_b_fc else 0), dy.new_empty(C if has_b_proj else 0)
        return torch.empty_like(dy), dy.new_empty(F, C), db_fc, dy.new_empty(C, F), db_proj

    def setup_context(
        ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    ) -> None:
        _, _, x_columns, _, b_fc, _, b_proj = inputs
        _, h, *weights = output
        ctx.save_for_backward(h, x_columns, *weights)
        ctx.has_b_fc, ctx.has_b_proj = b_fc is not None, b_proj is not None
        ctx.set_materialize_grads(False)  # only y has a gradient

    def backward(ctx: FunctionCtx, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        biases = {"has_b_fc": ctx.has_b_fc, "has_b_proj": ctx.has_b_proj}
        dx, dw_fc, db_fc, dw_proj, db_proj = mlp_bwd(dy.contiguous(), *ctx.saved_tensors, **biases)
        return dx, None, None, dw_fc, db_fc if ctx.has_b_fc else None, dw_proj, db_proj if ctx.has_b_proj else None

    mlp_bwd = bypass_dispatcher(mlp_bwd)
    mlp_fwd = bypass_dispatcher(mlp_fwd, backward, setup_context)

    def mlp(x: Tensor | InFp8, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
        matrix, rows, columns = matrix_and_layouts(x)
        y, *_ = mlp_fwd(matrix, rows, columns, w_fc, b_fc, w_proj, b_proj)
        return y.view(x.shape)

    return mlp
