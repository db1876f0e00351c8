"""The MLP around the two matmuls that triton.py and gluon.py compute: the four other matmuls, by cuBLAS, and autograd.

A backend brings two functions:

    fc_and_gelu(x, w_fc, b_fc, h, a)                      writes h = x W_fc^T + b_fc and a = gelu(h)
    proj_and_gelu_backward(dy, w_proj, h, a, dh, sums)    writes dh = (dy W_proj) gelu'(h) and again a. With `sums` it
                                                          returns partial sums of dh's rows (parts, R) in fp32

for x and dy (N, C), w_fc (R, C), b_fc (R,) or None, w_proj (C, F), h and dh (N, R), and a (N, F). All are contiguous.
h and dh may be one buffer: each element of h is read before that element of dh is written. R is F, or 2 F in the op
glu, where a is silu(gate) up. With activation="relu2", relu(h)^2 takes the place of gelu(h).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.sums import add_partial_sums, sum_rows


def define_mlp(name: str, fc_and_gelu: Callable, proj_and_gelu_backward: Callable) -> Callable:
    """Define the operators hotswap::NAME_fwd and hotswap::NAME_bwd.

    Return a function of x (..., C), w_fc, b_fc, w_proj, b_proj and save_h, which returns y (..., C). Without save_h,
    autograd does not save h, and the backward recomputes it.
    """

    def launch_forward(
        x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, save_h: bool
    ) -> tuple[Tensor, Tensor]:
        """Return y (N, C) and h (N, R), which the backward needs. If save_h is False, the returned h is empty."""
        h = x.new_empty(len(x), len(w_fc))
        a = x.new_empty(len(x), w_proj.shape[1])
        fc_and_gelu(x, w_fc, b_fc, h, a)
        y = a @ w_proj.T if b_proj is None else torch.addmm(b_proj, a, w_proj.T)
        return y, h if save_h else h.new_empty(0)

    def empty_outputs(
        x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, save_h: bool
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), x.new_empty((x.shape[0], w_fc.shape[0]) if save_h else 0)

    def launch_backward(
        dy: Tensor, h: Tensor, x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return dx, dw_fc, db_fc, dw_proj and db_proj. If a bias is missing, its gradient is empty.

        If h is empty, the backward recomputes it.
        """
        a, dh = x.new_empty(len(x), w_proj.shape[1]), x.new_empty(len(x), len(w_fc))
        if not h.numel():
            h = dh
            fc_and_gelu(x, w_fc, b_fc, h, a)
        partial = proj_and_gelu_backward(dy, w_proj, h, a, dh, b_fc is not None)
        db_fc = x.new_empty(0) if b_fc is None else add_partial_sums(partial, x.dtype)
        db_proj = x.new_empty(0) if b_proj is None else sum_rows(dy)
        return dh @ w_fc, dh.T @ x, db_fc, dy.T @ a, db_proj

    def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        *tensors, _ = inputs
        _, h = output
        ctx.save_for_backward(h, *tensors)
        ctx.set_materialize_grads(False)  # h gets no gradient, and filling an (N, F) gradient with zeros takes 0.1 ms

    def backward(ctx: FunctionCtx, dy: Tensor, _dh: Tensor | None) -> tuple[Tensor | None, ...]:
        return *mlp_bwd(dy.contiguous(), *ctx.saved_tensors), None

    mlp_bwd = custom_op(f"hotswap::{name}_bwd", launch_backward, lambda dy, h, *inputs: empty_gradients(*inputs))
    mlp_fwd = custom_op(f"hotswap::{name}_fwd", launch_forward, empty_outputs, backward, setup_context)

    def mlp(
        x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, save_h: bool
    ) -> Tensor:
        x_rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, _ = mlp_fwd(x_rows, w_fc, b_fc, w_proj, b_proj, save_h)
        return y.view(x.shape)

    return mlp
