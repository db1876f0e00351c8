"""The MLP with its six products in fp8.

    forward   pass     x, W_fc and W_proj to e4m3, by rows and by columns     (kernels/quantize.py; norm=triton for x)
              kernel   h = x W_fc^T + b_fc, in the compute dtype; a = gelu(h) in e4m3 by rows
              cuBLAS   y = a W_proj^T + b_proj
    backward  pass     dy to e5m2, by rows and by columns; db_proj
              kernel   da = dy W_proj; dh = da gelu'(h) in e5m2, by rows and by columns; db_fc; a again, by columns
              cuBLAS   dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x

On Hopper _gluon.py computes both lines named kernel, and rounds in its epilogue. Elsewhere cuBLAS multiplies, and
_gelu_fp8_kernel makes one pass over the product. At N = 65,536 and F = 3072 this pass moves 0.6 GB in the forward and
1.4 GB in the backward, where the matmul also writes 0.4 GB more. Autograd saves h, and in fp8 by columns x and both
weights. The backward computes a again, because it reads h anyway, so a by columns is not saved.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import bypass_dispatcher
from kernels.fp8 import E4M3, E5M2, X_SCALE, InFp8, product
from kernels.mlp import _gluon
from kernels.mlp._gelu import gelu_derivative, gelu_over_h
from kernels.quantize import (
    dy_scale,
    empty_fp8,
    load_rows,
    quantize,
    quantize_weight,
    scaled,
    store_columns,
    store_rows,
    tile_of_program,
    tiles,
    unit_of,
    with_layouts,
)
from kernels.sums import add_partial_sums


@triton.jit
def _gelu_and_dh(h_ptr, da_ptr, n, f, N, F, BACKWARD: tl.constexpr):
    """Return gelu(h), and with BACKWARD dh = da gelu'(h), of rows n and columns f."""
    h = load_rows(h_ptr, n, f, N, F, 0.0)
    s = gelu_over_h(h)
    dh = h
    if BACKWARD:
        dh = load_rows(da_ptr, n, f, N, F, 0.0) * gelu_derivative(h, s)
    return h * s, dh


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _gelu_fp8_kernel(
    h_ptr,  # (N, F)
    da_ptr,  # (N, F), backward only
    dy_unit_ptr,  # 1 / scale of dh, fp32; backward only
    a_ptr,  # gelu(h) in e4m3: by rows in the forward, by columns in the backward
    dh_rows_ptr,  # in e5m2, backward only
    dh_columns_ptr,  # in e5m2, backward only
    sums_ptr,  # (tiles along N, F) fp32, the sums of dh's rows in each tile, backward only; or None
    N,
    F,
    SCALE: tl.constexpr,  # of a
    BACKWARD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_n, quads, f = tile_of_program(N, F, BLOCK_N, BLOCK_C, GROUP)
    n = 4 * quads
    a0, dh0 = _gelu_and_dh(h_ptr, da_ptr, n, f, N, F, BACKWARD)
    a1, dh1 = _gelu_and_dh(h_ptr, da_ptr, n + 1, f, N, F, BACKWARD)
    a2, dh2 = _gelu_and_dh(h_ptr, da_ptr, n + 2, f, N, F, BACKWARD)
    a3, dh3 = _gelu_and_dh(h_ptr, da_ptr, n + 3, f, N, F, BACKWARD)
    a0, a1, a2, a3 = scaled(a0, SCALE), scaled(a1, SCALE), scaled(a2, SCALE), scaled(a3, SCALE)
    if BACKWARD:
        if sums_ptr is not None:
            tl.store(sums_ptr + tile_n.to(tl.int64) * F + f, tl.sum((dh0 + dh1) + (dh2 + dh3), 0), f < F)
        scale = tl.div_rn(1.0, tl.load(dy_unit_ptr))
        dh0, dh1, dh2, dh3 = scaled(dh0, scale), scaled(dh1, scale), scaled(dh2, scale), scaled(dh3, scale)
        store_rows(dh0, dh1, dh2, dh3, dh_rows_ptr, quads, f, N, F)
        store_columns(dh0, dh1, dh2, dh3, dh_columns_ptr, quads, f, N, F)
        store_columns(a0, a1, a2, a3, a_ptr, quads, f, N, F)
    else:
        store_rows(a0, a1, a2, a3, a_ptr, quads, f, N, F)


def fc_and_gelu(x: Tensor, w: Tensor, w_unit: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return h = x w^T + bias (N, F) in `dtype`, and gelu(h) in fp8 by rows, for x (N, C) and w (F, C) in fp8."""
    N, F, device = len(x), len(w), x.device
    h, a = x.new_empty(N, F, dtype=dtype), empty_fp8(N, F, E4M3, device)
    if _gluon.supports(dtype, x.shape[1], F, device, fp8=True):
        _gluon.launch_kernel(x, w, bias, h, a, None, None, x_scale=X_SCALE, w_unit=w_unit)
        return h, a
    h = product(x, w, (unit_of(X_SCALE, device), w_unit), dtype, bias)
    _, programs, parameters = tiles("gelu_fp8_fwd", h)
    _gelu_fp8_kernel[(programs,)](h, None, None, a, None, None, None, N, F, SCALE=X_SCALE, BACKWARD=False, **parameters)
    return h, a


def proj_and_gelu_backward(
    dy: Tensor, w: Tensor, w_unit: Tensor, h: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gelu(h) by columns, dh by rows and by columns, and with `sums` the sum of dh's rows (F,).

    dy (N, C) is in fp8, and so is w (F, C), W_proj by columns. h is (N, F).
    """
    (N, F), device = h.shape, h.device
    a = empty_fp8(F, N, E4M3, device)
    dh, dh_columns = (empty_fp8(*size, E5M2, device) for size in ((N, F), (F, N)))
    partial = None
    if _gluon.supports(h.dtype, dy.shape[1], F, device, fp8=True):
        if sums:
            partial = _gluon.empty_partial_sums(N, F, device)
        _gluon.launch_kernel(dy, w, None, h, a, dh, partial, dh_columns, dy_scale(N), w_unit)
    else:
        unit = unit_of(dy_scale(N), device)
        da = product(dy, w, (unit, w_unit), h.dtype)
        tiles_n, programs, parameters = tiles("gelu_fp8_bwd", h)
        if sums:
            partial = torch.empty(tiles_n, F, dtype=torch.float32, device=device)
        outputs = a, dh, dh_columns, partial
        _gelu_fp8_kernel[(programs,)](h, da, unit, *outputs, N, F, SCALE=X_SCALE, BACKWARD=True, **parameters)
    return a, dh, dh_columns, add_partial_sums(partial, h.dtype) if sums else h.new_empty(0)


@torch.library.custom_op("hotswap::mlp_fp8_fwd", mutates_args=())
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

    See with_layouts() for x.
    """
    fc_rows, fc_columns, fc_unit = quantize_weight(w_fc)
    proj_rows, proj_columns, proj_unit = quantize_weight(w_proj)
    h, a = fc_and_gelu(x_rows, fc_rows, fc_unit, b_fc, x.dtype)
    y = product(a, proj_rows, (unit_of(X_SCALE, x.device), proj_unit), x.dtype, b_proj)
    return y, h, fc_columns, fc_unit, proj_columns, proj_unit


@mlp_fwd.register_fake
def _(x, x_rows, x_columns, w_fc, b_fc, w_proj, b_proj):
    fc_columns, proj_columns = (empty_fp8(*weight.T.shape, E4M3, x.device) for weight in (w_fc, w_proj))
    fc_unit, proj_unit = (x.new_empty((), dtype=torch.float32) for _ in range(2))
    h = x.new_empty(x.shape[0], w_fc.shape[0])  # len(x) would be a number, and torch.compile would compile each length
    return x.new_empty(x.shape), h, fc_columns, fc_unit, proj_columns, proj_unit


@torch.library.custom_op("hotswap::mlp_fp8_bwd", mutates_args=())
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
    unit, x_unit = (unit_of(scale, dy.device) for scale in (dy_scale(len(dy)), X_SCALE))
    dy_rows, dy_columns, db_proj = quantize(dy, unit, E5M2, sums=has_b_proj)
    a_columns, dh_rows, dh_columns, db_fc = proj_and_gelu_backward(dy_rows, proj_columns, proj_unit, h, has_b_fc)
    del dy_rows
    dw_proj = product(dy_columns, a_columns, (unit, x_unit), dy.dtype)
    dx = product(dh_rows, fc_columns, (unit, fc_unit), dy.dtype)
    dw_fc = product(dh_columns, x_columns, (unit, x_unit), dy.dtype)
    return dx, dw_fc, db_fc, dw_proj, db_proj


@mlp_bwd.register_fake
def _(dy, h, x_columns, fc_columns, fc_unit, proj_columns, proj_unit, has_b_fc, has_b_proj):
    (N, C), F = dy.shape, h.shape[1]
    sizes = (N, C), (F, C), (F if has_b_fc else 0,), (C, F), (C if has_b_proj else 0,)
    return tuple(dy.new_empty(size) for size in sizes)


def _setup_context(ctx, inputs, output):
    (_, h, *weights), (_, _, x_columns, _, b_fc, _, b_proj) = output, inputs
    ctx.save_for_backward(h, x_columns, *weights)
    ctx.biases = b_fc is not None, b_proj is not None
    ctx.set_materialize_grads(False)  # only y has a gradient


def _backward(ctx, dy, *_):
    has_b_fc, has_b_proj = ctx.biases
    dx, dw_fc, db_fc, dw_proj, db_proj = mlp_bwd(dy.contiguous(), *ctx.saved_tensors, *ctx.biases)
    return dx, None, None, dw_fc, db_fc if has_b_fc else None, dw_proj, db_proj if has_b_proj else None


mlp_bwd = bypass_dispatcher(mlp_bwd)
mlp_fwd = bypass_dispatcher(mlp_fwd, _backward, _setup_context)


def mlp(x: Tensor | InFp8, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    y, *_ = mlp_fwd(*with_layouts(x), w_fc, b_fc, w_proj, b_proj)
    return y.view(x.shape)
