"""The matmuls with SwiGLU of the gated MLP in fp8: cuBLAS multiplies, and a pass over the product follows.

kernels/mlp/_fp8.py has the four other matmuls, the scales and autograd. At N = 65,536 and F = 2048 the pass moves 0.7
GB in the forward and 1.5 GB in the backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8 import X_SCALE, product
from kernels.mlp import _fp8
from kernels.mlp._activations import sigmoid, silu_derivative
from kernels.quantize import (
    MULTIPLE,
    choose_tile_launch,
    dy_scale,
    load_rows,
    scaled,
    store_columns,
    store_rows,
    tile_of_program,
    unit_tensor,
)

ROWS = 64  # of a tile. With 128, as in the MLP's pass, the whole op takes 4.25 ms instead of 3.11 (H200, 124M)


@triton.jit
def _glu_and_dh(h_ptr, da_ptr, n, f, N, F, BACKWARD: tl.constexpr):
    """Return a = silu(gate) up, and with BACKWARD dgate and dup, of rows n and hidden units f."""
    gate, up = load_rows(h_ptr, n, f, N, F, 0.0, 2 * F), load_rows(h_ptr + F, n, f, N, F, 0.0, 2 * F)
    s = sigmoid(gate, True)
    silu = gate * s
    dgate, dup = gate, up
    if BACKWARD:
        da = load_rows(da_ptr, n, f, N, F, 0.0)
        dgate, dup = da * up * silu_derivative(gate, s), da * silu
    return silu * up, dgate, dup


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _glu_fp8_kernel(
    h_ptr,  # (N, 2 F): gate and up
    da_ptr,  # (N, F), backward only
    dy_unit_ptr,  # 1 / scale of dh, fp32; backward only
    a_ptr,  # silu(gate) up in e4m3: by rows in the forward, by columns in the backward
    dh_rows_ptr,  # dgate and dup in e5m2, (N, 2 F), backward only
    dh_columns_ptr,  # the same by columns
    sums_ptr,  # (tiles along N, 2 F) fp32, the sums of dh's rows in each tile, backward only; or None
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
    a0, g0, u0 = _glu_and_dh(h_ptr, da_ptr, n, f, N, F, BACKWARD)
    a1, g1, u1 = _glu_and_dh(h_ptr, da_ptr, n + 1, f, N, F, BACKWARD)
    a2, g2, u2 = _glu_and_dh(h_ptr, da_ptr, n + 2, f, N, F, BACKWARD)
    a3, g3, u3 = _glu_and_dh(h_ptr, da_ptr, n + 3, f, N, F, BACKWARD)
    a0, a1, a2, a3 = scaled(a0, SCALE), scaled(a1, SCALE), scaled(a2, SCALE), scaled(a3, SCALE)
    if BACKWARD:
        if sums_ptr is not None:
            sums = sums_ptr + tile_n.to(tl.int64) * (2 * F) + f
            tl.store(sums, tl.sum((g0 + g1) + (g2 + g3), 0), f < F)
            tl.store(sums + F, tl.sum((u0 + u1) + (u2 + u3), 0), f < F)
        scale = tl.div_rn(1.0, tl.load(dy_unit_ptr))
        g0, g1, g2, g3 = scaled(g0, scale), scaled(g1, scale), scaled(g2, scale), scaled(g3, scale)
        u0, u1, u2, u3 = scaled(u0, scale), scaled(u1, scale), scaled(u2, scale), scaled(u3, scale)
        width, height = tl.cdiv(2 * F, MULTIPLE) * MULTIPLE, tl.cdiv(N, MULTIPLE) * MULTIPLE
        store_rows(g0, g1, g2, g3, dh_rows_ptr, quads, f, N, F, width)
        store_rows(u0, u1, u2, u3, dh_rows_ptr + F, quads, f, N, F, width)
        store_columns(g0, g1, g2, g3, dh_columns_ptr, quads, f, N, F)
        store_columns(u0, u1, u2, u3, dh_columns_ptr + tl.cast(F, tl.int64) * height, quads, f, N, F)
        store_columns(a0, a1, a2, a3, a_ptr, quads, f, N, F)
    else:
        store_rows(a0, a1, a2, a3, a_ptr, quads, f, N, F)


def fc_and_glu(x: Tensor, w: Tensor, w_unit: Tensor, bias: Tensor | None, a: Tensor, dtype: torch.dtype) -> Tensor:
    h = product(x, w, (unit_tensor(X_SCALE, x.device), w_unit), dtype, bias)
    N, F = len(x), len(w) // 2
    _, programs, parameters = choose_tile_launch("glu_fp8_fwd", h[:, :F], ROWS)
    unused = dict.fromkeys(("da_ptr", "dy_unit_ptr", "dh_rows_ptr", "dh_columns_ptr", "sums_ptr"))
    _glu_fp8_kernel[(programs,)](h_ptr=h, a_ptr=a, N=N, F=F, SCALE=X_SCALE, BACKWARD=False, **unused, **parameters)
    return h


def proj_and_glu_backward(
    dy: Tensor, w: Tensor, w_unit: Tensor, h: Tensor, a: Tensor, dh: Tensor, dh_columns: Tensor, sums: bool
) -> Tensor | None:
    N, F = len(h), len(w)
    dh.view(torch.uint8)[:, 2 * F :].zero_()  # the end of each row, up to a multiple of 16 bytes
    unit = unit_tensor(dy_scale(N), h.device)
    da = product(dy, w, (unit, w_unit), h.dtype)
    tiles_n, programs, parameters = choose_tile_launch("glu_fp8_bwd", da, ROWS)
    partial = torch.empty(tiles_n, 2 * F, dtype=torch.float32, device=h.device) if sums else None
    _glu_fp8_kernel[(programs,)](
        h_ptr=h,
        da_ptr=da,
        dy_unit_ptr=unit,
        a_ptr=a,
        dh_rows_ptr=dh,
        dh_columns_ptr=dh_columns,
        sums_ptr=partial,
        N=N,
        F=F,
        SCALE=X_SCALE,
        BACKWARD=True,
        **parameters,
    )
    return partial


glu = _fp8.define_mlp("glu_fp8", fc_and_glu, proj_and_glu_backward)
