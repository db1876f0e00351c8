"""Linear, bias, GELU, Linear, with the GELU and its derivative in the epilogues of the matmuls next to them.

The forward and backward of an MLP have six matmuls. cuBLAS computes four of them. The other two produce an (N, F)
tensor, F = 4 C, that still needs elementwise work. The kernel below computes these two matmuls and does that work while
a tile of the result is in registers. This work is called the epilogue of the tile:

    forward   kernel   h = x W_fc^T + b_fc       its epilogue stores h, for the backward, and a = gelu(h)
              cuBLAS   y = a W_proj^T + b_proj
    backward  kernel   da = dy W_proj            its epilogue loads h; it stores dh = da gelu'(h), a again, and the sum
                                                 of dh's rows in each tile, a partial sum of db_fc = sum_rows dh
              cuBLAS   dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x

For this work eager makes six more passes over an (N, F) tensor. GELU reads h and writes a, the backward of GELU reads
da and h and writes dh, and the sum of the bias gradient reads dh. At N = 65,536 and C = 768 a pass moves 0.4 GB, so six
passes take 0.6 ms of eager's 3.3 ms. Here autograd saves h but not a, because a would take another 0.4 GB a layer. The
backward recomputes a from h in its epilogue. The forward rounds h before it computes gelu(h), so forward and backward
compute the same bits of a.

Forward and backward are the same kernel, a persistent matmul: one program a multiprocessor walks over the tiles, in an
order that keeps their operands in the L2 cache. At K = C = 768 a matmul of (N, K) x (K, F) does
K F / (K + 2 F) = 341 FLOP for each byte of x, h and a in bf16, almost twice the ridge of an H200, 186 FLOP a byte. So
the matmul is long enough to hide the stores. But this kernel does not hide them, because the tensor cores wait during
its epilogue. On Hopper gluon.py hides most of it; the kernel below is easier to read, so read it first. With fp8,
_triton_fp8.py computes the MLP. The four other matmuls and autograd are in _op.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import check_dtypes, multiprocessors
from kernels.gpu import triton_and_cublas_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.mlp import _op, _triton_fp8
from kernels.mlp._gelu import gelu_derivative, gelu_over_h
from kernels.quantize import candidates as quantize_candidates
from kernels.tiles import place
from kernels.tuned import launch_parameters

PARAMETERS = "BLOCK_N", "BLOCK_F", "BLOCK_C", "num_warps", "num_stages", "programs"
INPUT_IN_FP8 = True
RUNS = {"fp8": ("^_gelu_fp8_kernel|::mlp_fp8",), "triton": ("^_mlp_kernel|::mlp_fwd",)}


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _mlp_kernel(
    x_ptr,  # forward: x (N, C); backward: dy (N, C)
    w_ptr,  # forward: w_fc (F, C); backward: w_proj (C, F)
    b_ptr,  # forward: b_fc (F,), read only with HAS_BIAS
    h_ptr,  # (N, F), written by the forward and read by the backward
    a_ptr,  # (N, F) gelu(h)
    dh_ptr,  # (N, F), backward only
    partial_ptr,  # (tiles along N, F) fp32: the sum of dh's rows in each tile, backward with HAS_BIAS only
    N,
    F,
    C,
    BACKWARD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dtype = h_ptr.dtype.element_ty
    tiles_n, tiles_f = tl.cdiv(N, BLOCK_N), tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_f, tl.num_programs(0), flatten=True):
        tile_n, tile_f = place(tile, tiles_n, tiles_f, GROUP)
        n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]  # int64: N F can exceed 2^31
        f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
        total = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            x_tile = tl.load(x_ptr + n * C + c[None, :], (n < N) & (c < C)[None, :], other=0.0)
            # w_tile is a (BLOCK_C, BLOCK_F) tile of a (C, F) matrix; in the forward w is the transpose of this matrix
            row = (c if BACKWARD else f).to(tl.int64)  # of w: C F can exceed 2^31, too
            w_offsets = row[:, None] * F + f[None, :] if BACKWARD else row[None, :] * C + c[:, None]
            w_tile = tl.load(w_ptr + w_offsets, (c < C)[:, None] & (f < F)[None, :], other=0.0)
            total = tl.dot(x_tile, w_tile, total, input_precision=PRECISION)
        offsets, mask = n * F + f[None, :], (n < N) & (f < F)[None, :]
        if BACKWARD:
            h = tl.load(h_ptr + offsets, mask, other=0.0).to(tl.float32)
            s = gelu_over_h(h)
            dh = (total * gelu_derivative(h, s)).to(dtype)
            tl.store(dh_ptr + offsets, dh, mask)
            if HAS_BIAS:
                tl.store(partial_ptr + tile_n.to(tl.int64) * F + f, tl.sum(dh.to(tl.float32), 0), f < F)
        else:
            if HAS_BIAS:
                total += tl.load(b_ptr + f, f < F, other=0.0).to(tl.float32)[None, :]
            rounded = total.to(dtype)
            tl.store(h_ptr + offsets, rounded, mask)
            h = rounded.to(tl.float32)
            s = gelu_over_h(h)
        tl.store(a_ptr + offsets, (h * s).to(dtype), mask)


def default_launch(dtype: torch.dtype, backward: bool) -> dict:
    """Return the default launch parameters. `programs` is the number of programs per multiprocessor."""
    if dtype == torch.float32:  # for comparisons of results, not for speed: the matmuls are fp32, not TF32
        values = 64, 256, 128, 8, 1, 1
    elif backward:
        values = 128, 64, 32, 8, 3, 1
    else:
        values = 128, 128, 32, 8, 3, 1
    return dict(zip(PARAMETERS, values, strict=True)) | {"GROUP": 8}


def candidates(kernel: str, default: dict) -> list[dict]:
    """Return the launch parameters that scripts/tune.py tries for `kernel`.

    Some run two or more programs on a multiprocessor, so that one program can store while another multiplies.
    """
    if kernel == "quantize" or kernel.startswith("gelu_fp8"):
        return quantize_candidates()
    choices = [(128, 128, 32, 8, 3, 1), (128, 128, 32, 8, 4, 1), (128, 128, 64, 8, 3, 1), (128, 64, 32, 8, 3, 1)]
    choices += [(128, 64, 32, 4, 4, 2), (64, 128, 32, 4, 3, 2), (64, 64, 32, 4, 3, 4)]
    return [dict(zip(PARAMETERS, choice, strict=True)) for choice in choices] + [{"GROUP": 4}, {"GROUP": 16}]


def choose_launch(x: Tensor, F: int, backward: bool) -> dict:
    """Return the launch parameters of _mlp_kernel. x is (N, C): the input, or dy."""
    key = f"{x.shape[1]} {F} {x.dtype}"
    return launch_parameters("mlp_bwd" if backward else "mlp_fwd", key, default_launch(x.dtype, backward), x.device)


def launch_kernel(x, w, b, h, a, dh=None, partial=None) -> None:
    """Run the kernel, backward if dh is given and otherwise forward. All tensors are contiguous.

    The arguments have the shapes of _mlp_kernel: in the backward, x is dy and w is w_proj.
    """
    (N, C), F, backward = x.shape, h.shape[1], dh is not None
    launch = choose_launch(x, F, backward)
    programs = launch.pop("programs") * multiprocessors(x.device)
    tiles = triton.cdiv(N, launch["BLOCK_N"]) * triton.cdiv(F, launch["BLOCK_F"])
    _mlp_kernel[(min(tiles, programs),)](
        x,
        w,
        b,
        h,
        a,
        dh,
        partial,
        N,
        F,
        C,
        BACKWARD=backward,
        HAS_BIAS=(partial if backward else b) is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",  # matters only for fp32
        **launch,
    )


def fc_and_gelu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, h: Tensor, a: Tensor) -> None:
    launch_kernel(x, w_fc, b_fc, h, a)


def proj_and_gelu_backward(dy: Tensor, w_proj: Tensor, h: Tensor, a: Tensor, dh: Tensor, sums: bool) -> Tensor | None:
    N, F, partial = *h.shape, None
    if sums:
        tiles = triton.cdiv(N, choose_launch(dy, F, backward=True)["BLOCK_N"])
        partial = torch.empty(tiles, F, dtype=torch.float32, device=h.device)
    launch_kernel(dy, w_proj, None, h, a, dh=dh, partial=partial)
    return partial


unquantized_mlp = _op.define("mlp", fc_and_gelu, proj_and_gelu_backward)


def mlp(x, w_fc, b_fc, w_proj, b_proj, fp8=False):
    check_dtypes("mlp", x, w_fc, fp8=fp8)
    if fp8:
        return _triton_fp8.mlp(x, w_fc, b_fc, w_proj, b_proj)
    return unquantized_mlp(x, w_fc, b_fc, w_proj, b_proj, save_h=True)
