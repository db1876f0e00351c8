"""Linear, bias, GELU, Linear, with the GELU and its derivative in the epilogues of the matmuls next to them.

With activation="relu2", relu(h)^2 takes the place of gelu(h).

The forward and backward of an MLP have six matmuls. cuBLAS computes four of them. The other two produce an (N, F)
tensor, F = 4 C, that still needs elementwise work. The kernels below compute these two matmuls, and do that work while
a tile of the result is in registers. This work is called the epilogue of the tile:

    forward   kernel   h = x W_fc^T + b_fc       its epilogue stores h, for the backward, and a = gelu(h)
              cuBLAS   y = a W_proj^T + b_proj
    backward  kernel   da = dy W_proj            its epilogue loads h; it stores dh = da gelu'(h), a again, and sums of
                                                 dh's rows in each tile, partial sums of db_fc = sum_rows dh
              cuBLAS   dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x

For this work eager makes six more passes over an (N, F) tensor. GELU reads h and writes a, the backward of GELU reads
da and h and writes dh, and the sum of the bias gradient reads dh. At N = 65,536 and C = 768 a pass moves 0.4 GB, so six
passes take 0.6 ms of eager's 3.2 ms. Here autograd saves h but not a, because a would take another 0.4 GB a layer. The
backward recomputes a from h in its epilogue. The forward rounds h before it computes gelu(h), so forward and backward
compute the same bits of a.

kernels/matmul.py explains the matmul. Two programs share a multiprocessor, so that the tensor cores work for one while
the other runs its epilogue. On one H200 in bf16, at 65,536 x 768 and in one run, the forward's kernel takes 570 us and
the backward's 755, where cuBLAS takes 430 for either matmul alone (in longer runs, at the GPU's power limit, 510). The
forward stores h and a, and the backward also loads h: 0.8 and 1.2 GB, which take 0.2 and 0.3 ms by themselves. Three
things were expensive, and are avoided:

    layouts     Triton computed a in the backward twice, once for each layout of the stores: 120 us (round_both)
    rounding    one number at a time, where the GPU can round two: 12 us in the forward (round_to)
    sums        a sum over all rows of a tile takes shared memory and barriers: 28 us. Each of 4 warps sums its 32 rows

One kernel for the whole MLP would be slower. A program would keep y of its tokens in registers, in fp32, and read all
9.4 MB of weights. A multiprocessor has registers for 64 tokens of 768 channels, but not for 128, and 64 tokens do 64
FLOP a byte: to keep the tensor cores busy, the L2 cache would have to deliver 12 TB/s.

On Hopper gluon.py is faster still; the kernels below are easier to read, so read them first. With fp8, _triton_fp8.py
computes the MLP. The four other matmuls and autograd are in _op.py.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8 import InFp8
from kernels.gpu import check_dtypes
from kernels.gpu import triton_and_cublas_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.matmul import (
    FP32_LAUNCH,
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
from kernels.mlp import _op, _triton_fp8
from kernels.mlp._activations import activate, activation_derivative
from kernels.quantize import candidates as quantize_candidates
from kernels.tiles import place

INPUT_IN_FP8 = True
RUNS = {"fp8": ("^_gelu_fp8_kernel|::mlp_(relu2_)?fp8",), "triton": ("^_mlp_fwd_kernel|::mlp_(relu2_)?fwd",)}


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _mlp_fwd_kernel(
    x,  # (N, C)
    w,  # w_fc (F, C)
    b_ptr,  # b_fc (F,), or None
    h,  # (N, F)
    a,  # (N, F) gelu(h)
    N,
    F,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_F // PARTS
    tiles_n, tiles_f = tl.cdiv(N, BLOCK_N), tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_f, tl.num_programs(0), flatten=True):
        tile_n, tile_f = place(tile, tiles_n, tiles_f, GROUP)
        n, first = tile_n * BLOCK_N, tile_f * BLOCK_F
        total = multiply_tile(x, w, n, first, N, F, C, True, BLOCK_N, BLOCK_F, BLOCK_C, TMA, PRECISION)
        parts = split_columns(total, PARTS)
        for i in tl.static_range(PARTS):
            part, f = parts[i], first + i * WIDTH
            if b_ptr is not None:
                columns = f + tl.arange(0, WIDTH)
                part += tl.load(b_ptr + columns, columns < F, other=0.0).to(tl.float32)[None, :]
            rounded = round_to(part, dtype)
            store_matrix_tile(h, rounded, n, f, N, F, TMA)
            activated, _ = activate(rounded.to(tl.float32), ACTIVATION, dtype != tl.float32)
            store_matrix_tile(a, round_to(activated, dtype), n, f, N, F, TMA)


@triton.jit(do_not_specialize=["N"])
def _mlp_bwd_kernel(
    dy,  # (N, C)
    w,  # w_proj (C, F)
    h,  # (N, F)
    a,  # (N, F) gelu(h)
    dh,  # (N, F)
    partial_ptr,  # (SUMS x tiles along N, F) fp32: the sums of dh's rows in each tile; or None
    N,
    F,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SUMS: tl.constexpr,  # of a tile: one for each warp, which has 16 rows of every 16 SUMS rows; at most BLOCK_N / 16
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
            numbers = load_matrix_tile(h, n, f, N, F, BLOCK_N, WIDTH, TMA).to(tl.float32)
            activated, s = activate(numbers, ACTIVATION, dtype != tl.float32)
            gradient = parts[i] * activation_derivative(numbers, s, ACTIVATION)
            dh_part, a_part = round_both(gradient, activated, dtype)
            store_matrix_tile(dh, dh_part, n, f, N, F, TMA)
            store_matrix_tile(a, a_part, n, f, N, F, TMA)
            if partial_ptr is not None:
                sums = tl.sum(tl.sum(gradient.reshape(BLOCK_N // (16 * SUMS), SUMS, 16, WIDTH), 0), 1)
                row, columns = tile_n * SUMS + tl.arange(0, SUMS)[:, None], f + tl.arange(0, WIDTH)[None, :]
                mask = (row >= 0) & (columns < F)  # the first condition only gives the mask its rows
                tl.store(partial_ptr + row.to(tl.int64) * F + columns, sums, mask)


def default_launch(dtype: torch.dtype, tma: bool, backward: bool) -> dict:
    """Return the default launch parameters.

    With TMA a program takes 112 KB of shared memory on compute capability 9.0, so two share a multiprocessor. On 10.0
    the backward takes 120 KB, and only one fits. Without TMA a program takes 40 KB, and 128 registers a thread.
    """
    if dtype == torch.float32:
        values = FP32_LAUNCH
    elif tma:
        values = 128, 128, 64, 4 if backward else 2, 4, 3, 2
    elif backward:
        values = 128, 64, 32, 2, 8, 3, 2
    else:
        values = 128, 128, 32, 4, 8, 3, 2
    return as_parameters(*values) | {"GROUP": 8}


def candidates(kernel: str, default: dict) -> list[dict]:
    if kernel == "quantize" or kernel.startswith("gelu_fp8"):
        return quantize_candidates()
    # Most run two programs or more on a multiprocessor, so that one program can store while another multiplies
    choices = [(128, 128, 64, 4, 8, 3, 2), (128, 256, 64, 4, 8, 3, 1), (128, 128, 64, 2, 4, 3, 2)]
    choices += [(128, 128, 32, 1, 8, 3, 1), (128, 128, 32, 1, 8, 4, 1), (128, 64, 32, 1, 8, 3, 1)]
    choices += [(128, 64, 32, 1, 4, 4, 2), (64, 128, 32, 1, 4, 3, 2), (64, 64, 32, 1, 4, 3, 4)]
    return [as_parameters(*choice) for choice in choices] + [{"GROUP": 4}, {"GROUP": 16}]


def fc_and_activation(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, h: Tensor, a: Tensor, activation: str = "gelu"
) -> None:
    F, C = w_fc.shape
    tma = can_use_tma(x, w_fc, h, a)
    grid, launch = choose_launch("mlp_fwd", x, F, tma, default_launch(x.dtype, tma, backward=False))
    n, f, c = (launch[name] for name in ("BLOCK_N", "BLOCK_F", "BLOCK_C"))
    _mlp_fwd_kernel[grid](
        x=kernel_argument(x, n, c, tma=tma),
        w=kernel_argument(w_fc, f, c, tma=tma),
        b_ptr=b_fc,
        h=kernel_argument(h, n, f // launch["PARTS"], tma=tma),
        a=kernel_argument(a, n, f // launch["PARTS"], tma=tma),
        N=len(x),
        F=F,
        C=C,
        ACTIVATION=activation,
        TMA=tma,
        PRECISION=precision(x.dtype),
        **launch,
    )


def proj_and_activation_backward(
    dy: Tensor, w_proj: Tensor, h: Tensor, a: Tensor, dh: Tensor, sums: bool, activation: str = "gelu"
) -> Tensor | None:
    C, F = w_proj.shape
    tma = can_use_tma(dy, w_proj, h, a, dh)
    grid, launch = choose_launch("mlp_bwd", dy, F, tma, default_launch(dy.dtype, tma, backward=True))
    n, f, c = (launch[name] for name in ("BLOCK_N", "BLOCK_F", "BLOCK_C"))
    sums_of_tile = min(launch["num_warps"], n // 16)
    partial_sums = None
    if sums:
        rows = triton.cdiv(len(dy), n) * sums_of_tile
        partial_sums = torch.empty(rows, F, dtype=torch.float32, device=h.device)
    _mlp_bwd_kernel[grid](
        dy=kernel_argument(dy, n, c, tma=tma),
        w=kernel_argument(w_proj, c, f, tma=tma),
        h=kernel_argument(h, n, f // launch["PARTS"], tma=tma),
        a=kernel_argument(a, n, f // launch["PARTS"], tma=tma),
        dh=kernel_argument(dh, n, f // launch["PARTS"], tma=tma),
        partial_ptr=partial_sums,
        N=len(dy),
        F=F,
        C=C,
        ACTIVATION=activation,
        SUMS=sums_of_tile,
        TMA=tma,
        PRECISION=precision(dy.dtype),
        **launch,
    )
    return partial_sums


unquantized_mlp = _op.define_mlp("mlp", fc_and_activation, proj_and_activation_backward)
unquantized_relu2 = _op.define_mlp(
    "mlp_relu2",
    partial(fc_and_activation, activation="relu2"),
    partial(proj_and_activation_backward, activation="relu2"),
)


def mlp(
    x: Tensor | InFp8,
    w_fc: Tensor,
    b_fc: Tensor | None,
    w_proj: Tensor,
    b_proj: Tensor | None,
    fp8: bool = False,
    activation: str = "gelu",
) -> Tensor:
    check_dtypes("mlp", x, w_fc, fp8=fp8)
    if fp8:
        in_fp8 = _triton_fp8.mlp if activation == "gelu" else _triton_fp8.relu2
        return in_fp8(x, w_fc, b_fc, w_proj, b_proj)
    unquantized = unquantized_mlp if activation == "gelu" else unquantized_relu2
    return unquantized(x, w_fc, b_fc, w_proj, b_proj, save_h=True)
