"""The gated MLP with its activation in the epilogues of two matmuls, as in kernels/mlp/triton.py, which explains them.

    forward   kernel   gate, up = x W_fc^T + b_fc   its epilogue stores both, and a = silu(gate) up
              cuBLAS   y = a W_proj^T + b_proj
    backward  kernel   da = dy W_proj               its epilogue loads gate and up; it stores a again, and
                                                    dgate = da up silu'(gate) and dup = da silu(gate), side by side
              cuBLAS   dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x, where dh = (dgate, dup), (N, 2 F)

Gate and up of the same hidden units must meet in one program. So a tile of the weight has BLOCK_F / 2 rows of the gate
and the same rows of up, one below the other, and one matmul of full width computes both. split_columns() then splits
the tile into its gate half and its up half, and no data moves between threads.

Between the matmuls, eager reads and writes 5 N F numbers in the forward, and about 13 N F in the backward. The kernels
here also hold the matmuls' results in registers: they write 3 N F numbers, and read 2 N F and write 3 N F.

Milliseconds on one H200 in bf16, in one run, at 65,536 x 768 and F = 2048. Liger's pass runs between cuBLAS's matmuls.
Only the forward gains from its epilogue; in fp8 both ways take 2.11, and with torch.compile 3.35:

               here    Liger    torch.compile
    forward    0.94     1.02             1.02
    backward   1.97     1.90             2.11
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8 import InFp8
from kernels.glu import _triton_fp8
from kernels.gpu import check_dtypes
from kernels.gpu import triton_and_cublas_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.matmul import (
    as_parameters,
    can_use_tma,
    choose_launch,
    kernel_argument,
    load_matrix_tile,
    multiply_tile,
    precision,
    round_both,
    round_to,
    split_columns,
    store_matrix_tile,
)
from kernels.mlp import _op
from kernels.mlp import triton as mlp
from kernels.mlp._activations import sigmoid, silu_derivative
from kernels.quantize import candidates as quantize_candidates
from kernels.tiles import place

INPUT_IN_FP8 = True
RUNS = {"fp8": ("^_glu_fp8_kernel|::glu_fp8",), "triton": ("^_glu_fwd_kernel|::glu_fwd",)}
FAMILY = "_glu_"


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _glu_fwd_kernel(
    x,  # (N, C)
    w,  # w_fc (2, F, C)
    b_ptr,  # b_fc (2 F,), or None
    gate,  # (N, F), whose rows are 2 F apart
    up,  # like gate
    a,  # (N, F) silu(gate) up
    N,
    F,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,  # columns of a tile: half of them are the gate's
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
    UNITS: tl.constexpr = BLOCK_F // 2  # hidden units of a tile
    WIDTH: tl.constexpr = BLOCK_F // PARTS
    tiles_n, tiles_f = tl.cdiv(N, BLOCK_N), tl.cdiv(F, UNITS)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_f, tl.num_programs(0), flatten=True):
        tile_n, tile_f = place(tile, tiles_n, tiles_f, GROUP)
        n, first = tile_n * BLOCK_N, tile_f * UNITS
        total = multiply_tile(x, w, n, first, N, F, C, True, BLOCK_N, BLOCK_F, BLOCK_C, TMA, PRECISION, GATED=True)
        parts = split_columns(total, PARTS)
        for i in tl.static_range(PARTS // 2):
            gate_part, up_part, f = parts[i], parts[i + PARTS // 2], first + i * WIDTH
            if b_ptr is not None:
                columns = f + tl.arange(0, WIDTH)
                gate_part += tl.load(b_ptr + columns, columns < F, other=0.0).to(tl.float32)[None, :]
                up_part += tl.load(b_ptr + F + columns, columns < F, other=0.0).to(tl.float32)[None, :]
            gate_part, up_part = round_to(gate_part, dtype), round_to(up_part, dtype)
            store_matrix_tile(gate, gate_part, n, f, N, F, TMA, 2 * F)
            store_matrix_tile(up, up_part, n, f, N, F, TMA, 2 * F)
            numbers = gate_part.to(tl.float32)
            product = numbers * sigmoid(numbers, dtype != tl.float32) * up_part.to(tl.float32)
            store_matrix_tile(a, round_to(product, dtype), n, f, N, F, TMA)


@triton.jit(do_not_specialize=["N"])
def _glu_bwd_kernel(
    dy,  # (N, C)
    w,  # w_proj (C, F)
    gate,  # (N, F), whose rows are 2 F apart, like those of up, dgate and dup
    up,
    a,  # (N, F) silu(gate) up
    dgate,
    dup,
    partial_ptr,  # (SUMS x tiles along N, 2 F) fp32: the sums of dgate's and dup's rows in each tile; or None
    N,
    F,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,  # of a tile: see kernels/mlp/triton.py
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dtype: tl.constexpr = dy.dtype if TMA else dy.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_F // PARTS
    tiles_n, tiles_f = tl.cdiv(N, BLOCK_N), tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_f, tl.num_programs(0), flatten=True):
        tile_n, tile_f = place(tile, tiles_n, tiles_f, GROUP)
        n, first = tile_n * BLOCK_N, tile_f * BLOCK_F
        total = multiply_tile(dy, w, n, first, N, F, C, False, BLOCK_N, BLOCK_F, BLOCK_C, TMA, PRECISION)
        parts = split_columns(total, PARTS)
        for i in tl.static_range(PARTS):
            f = first + i * WIDTH
            g = load_matrix_tile(gate, n, f, N, F, BLOCK_N, WIDTH, TMA, 2 * F).to(tl.float32)
            u = load_matrix_tile(up, n, f, N, F, BLOCK_N, WIDTH, TMA, 2 * F).to(tl.float32)
            s = sigmoid(g, dtype != tl.float32)
            dg, du = parts[i] * u * silu_derivative(g, s), parts[i] * (g * s)
            dg_part, a_part = round_both(dg, g * s * u, dtype)
            store_matrix_tile(dgate, dg_part, n, f, N, F, TMA, 2 * F)
            store_matrix_tile(dup, round_to(du, dtype), n, f, N, F, TMA, 2 * F)
            store_matrix_tile(a, a_part, n, f, N, F, TMA)
            if partial_ptr is not None:
                row, columns = tile_n * SUMS + tl.arange(0, SUMS)[:, None], f + tl.arange(0, WIDTH)[None, :]
                # the first condition only gives the mask its rows
                target, mask = partial_ptr + row.to(tl.int64) * (2 * F) + columns, (row >= 0) & (columns < F)
                tl.store(target, tl.sum(tl.sum(dg.reshape(BLOCK_N // (16 * SUMS), SUMS, 16, WIDTH), 0), 1), mask)
                tl.store(target + F, tl.sum(tl.sum(du.reshape(BLOCK_N // (16 * SUMS), SUMS, 16, WIDTH), 0), 1), mask)


def default_launch(dtype: torch.dtype, tma: bool, backward: bool) -> dict:
    """Return the default launch parameters, those of the MLP."""
    launch = mlp.default_launch(dtype, tma, backward)
    return launch | {"PARTS": max(2, launch["PARTS"])}  # gate and up


def candidates(kernel: str, default: dict) -> list[dict]:
    if kernel == "quantize" or kernel.startswith("glu_fp8"):
        return quantize_candidates()
    choices = [(128, 128, 64, 2, 4, 3, 2), (128, 128, 64, 4, 4, 3, 2), (128, 128, 64, 4, 8, 3, 2)]
    choices += [(128, 256, 64, 4, 8, 3, 1), (128, 256, 64, 8, 8, 3, 1), (128, 128, 64, 2, 8, 4, 1)]
    choices += [(128, 128, 32, 2, 8, 3, 1), (128, 64, 32, 2, 4, 4, 2), (64, 128, 32, 2, 4, 3, 2)]
    return [as_parameters(*choice) for choice in choices] + [{"GROUP": 4}, {"GROUP": 16}]


def fc_and_glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, h: Tensor, a: Tensor) -> None:
    """Write h = x W_fc^T + b_fc, (N, 2 F), and a = silu(gate) up, (N, F)."""
    gate, up = h.chunk(2, 1)
    w = w_fc.unflatten(0, (2, -1))
    (_, F, C), tma = w.shape, can_use_tma(x, w_fc, gate, up, a)
    grid, launch = choose_launch("glu_fwd", x, 2 * F, tma, default_launch(x.dtype, tma, backward=False))
    n, f, c = (launch[name] for name in ("BLOCK_N", "BLOCK_F", "BLOCK_C"))
    outputs = {"gate": gate, "up": up, "a": a}
    _glu_fwd_kernel[grid](
        x=kernel_argument(x, n, c, tma=tma),
        w=kernel_argument(w, 2, f // 2, c, tma=tma),
        b_ptr=b_fc,
        N=len(x),
        F=F,
        C=C,
        TMA=tma,
        PRECISION=precision(x.dtype),
        **{name: kernel_argument(matrix, n, f // launch["PARTS"], tma=tma) for name, matrix in outputs.items()},
        **launch,
    )


def proj_and_glu_backward(dy: Tensor, w_proj: Tensor, h: Tensor, a: Tensor, dh: Tensor, sums: bool) -> Tensor | None:
    """Write dh = (dgate, dup), (N, 2 F), and a. With `sums`, return partial sums of dh's rows."""
    (C, F), halves = w_proj.shape, (*h.chunk(2, 1), *dh.chunk(2, 1))
    tma = can_use_tma(dy, w_proj, a, *halves)
    grid, launch = choose_launch("glu_bwd", dy, F, tma, default_launch(dy.dtype, tma, backward=True))
    n, f, c = (launch[name] for name in ("BLOCK_N", "BLOCK_F", "BLOCK_C"))
    sums_of_tile = min(launch["num_warps"], n // 16)
    partial = None
    if sums:
        rows = triton.cdiv(len(dy), n) * sums_of_tile
        partial = torch.empty(rows, 2 * F, dtype=torch.float32, device=h.device)
    matrices = dict(zip(("gate", "up", "dgate", "dup", "a"), (*halves, a), strict=True))
    _glu_bwd_kernel[grid](
        dy=kernel_argument(dy, n, c, tma=tma),
        w=kernel_argument(w_proj, c, f, tma=tma),
        partial_ptr=partial,
        N=len(dy),
        F=F,
        C=C,
        SUMS=sums_of_tile,
        TMA=tma,
        PRECISION=precision(dy.dtype),
        **{name: kernel_argument(matrix, n, f // launch["PARTS"], tma=tma) for name, matrix in matrices.items()},
        **launch,
    )
    return partial


unquantized_glu = _op.define_mlp("glu", fc_and_glu, proj_and_glu_backward)


def glu(
    x: Tensor | InFp8, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, fp8: bool = False
) -> Tensor:
    check_dtypes("glu", x, w_fc, fp8=fp8)
    if fp8:
        return _triton_fp8.glu(x, w_fc, b_fc, w_proj, b_proj)
    return unquantized_glu(x, w_fc, b_fc, w_proj, b_proj, save_h=True)
