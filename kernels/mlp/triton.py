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
its epilogue. On Hopper, in 16-bit dtypes and for widths that are multiples of 8, the kernel of _gluon.py runs instead,
which hides most of it (its times are in _gluon.py). The kernel below is easier to read, so read it first. With fp8,
_fp8.py computes the MLP.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import bypass_dispatcher
from kernels.gpu import check_dtypes, multiprocessors, triton_detail
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.mlp import _fp8, _gluon
from kernels.mlp._gelu import gelu_derivative, gelu_over_h
from kernels.quantize import candidates as quantize_candidates
from kernels.sums import add_partial_sums, sum_rows
from kernels.tiles import place
from kernels.tuned import launch_parameters

PARAMETERS = "BLOCK_N", "BLOCK_F", "BLOCK_C", "num_warps", "num_stages", "programs"
INPUT_IN_FP8 = True
RUNS = {"fp8": ("_gelu_fp8_kernel|mlp_gluon_kernel|::mlp_fp8",), "triton": ("mlp_(gluon_)?kernel|::mlp_fwd",)}


def detail(x: Tensor, w_fc: Tensor, fp8: bool = False, **rest) -> str:
    F, C = w_fc.shape
    text = f"{triton_detail(x=x)}, fp8" if fp8 else triton_detail(x=x)
    return f"{text}, Gluon" if _gluon.supports(x.dtype, C, F, x.device, fp8) else text


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
    if _gluon.supports(x.dtype, C, F, x.device):
        _gluon.launch_kernel(x, w, b, h, a, dh, partial)
        return
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


@torch.library.custom_op("hotswap::mlp_fwd", mutates_args=())
def mlp_fwd(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, save_h: bool
) -> tuple[Tensor, Tensor]:
    """Return y (N, C) and h (N, F), which the backward needs. If save_h is False, the returned h is empty."""
    h = x.new_empty(len(x), len(w_fc))
    a = torch.empty_like(h)
    launch_kernel(x, w_fc, b_fc, h, a)
    y = a @ w_proj.T if b_proj is None else torch.addmm(b_proj, a, w_proj.T)
    return y, h if save_h else h.new_empty(0)


@mlp_fwd.register_fake
def _(x, w_fc, b_fc, w_proj, b_proj, save_h):
    return torch.empty_like(x), x.new_empty((x.shape[0], w_fc.shape[0]) if save_h else 0)


@torch.library.custom_op("hotswap::mlp_bwd", mutates_args=())
def mlp_bwd(
    dy: Tensor, x: Tensor, h: Tensor | None, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, has_b_proj: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dx, dw_fc, db_fc, dw_proj and db_proj. If a bias is missing, its gradient is empty.

    If h is None, the backward recomputes it.
    """
    N, F = len(x), len(w_fc)
    a, dh = x.new_empty(N, F), x.new_empty(N, F)
    if h is None:
        h = dh  # one buffer is enough: a program reads a tile of h before it writes that tile of dh
        launch_kernel(x, w_fc, b_fc, h, a)
    partial, db_fc = None, x.new_empty(0)
    if b_fc is not None:
        if _gluon.supports(dy.dtype, dy.shape[1], F, x.device):
            partial = _gluon.empty_partial_sums(N, F, x.device)
        else:
            rows = triton.cdiv(N, choose_launch(dy, F, backward=True)["BLOCK_N"])
            partial = torch.empty(rows, F, dtype=torch.float32, device=x.device)
    launch_kernel(dy, w_proj, None, h, a, dh=dh, partial=partial)
    if b_fc is not None:
        db_fc = add_partial_sums(partial, x.dtype)
    db_proj = sum_rows(dy) if has_b_proj else x.new_empty(0)
    return dh @ w_fc, dh.T @ x, db_fc, dy.T @ a, db_proj


@mlp_bwd.register_fake
def _(dy, x, h, w_fc, b_fc, w_proj, has_b_proj):
    db_fc = x.new_empty(0 if b_fc is None else w_fc.shape[0])
    db_proj = x.new_empty(w_proj.shape[0] if has_b_proj else 0)
    return torch.empty_like(x), torch.empty_like(w_fc), db_fc, torch.empty_like(w_proj), db_proj


def _setup_context(ctx, inputs, output):
    x, w_fc, b_fc, w_proj, b_proj, save_h = inputs
    _, h = output
    ctx.save_for_backward(x, h if save_h else None, w_fc, b_fc, w_proj)
    ctx.biases = b_fc is not None, b_proj is not None
    ctx.set_materialize_grads(False)  # h gets no gradient, and filling an (N, F) gradient with zeros takes 0.1 ms


def _backward(ctx, dy, _dh):
    has_b_fc, has_b_proj = ctx.biases
    dx, dw_fc, db_fc, dw_proj, db_proj = mlp_bwd(dy.contiguous(), *ctx.saved_tensors, has_b_proj)
    return dx, dw_fc, db_fc if has_b_fc else None, dw_proj, db_proj if has_b_proj else None, None


mlp_bwd = bypass_dispatcher(mlp_bwd)
mlp_fwd = bypass_dispatcher(mlp_fwd, _backward, _setup_context)


def mlp(x, w_fc, b_fc, w_proj, b_proj, fp8=False):
    if not fp8:
        return apply_to_rows(x, w_fc, b_fc, w_proj, b_proj, save_h=True)
    check_dtypes("mlp", x, w_fc, fp8=True)
    return _fp8.mlp(x, w_fc, b_fc, w_proj, b_proj)


def apply_to_rows(x, w_fc, b_fc, w_proj, b_proj, save_h):
    """Call mlp_fwd() with x as (N, C) and return y in the shape of x. Raises Unavailable if a dtype is unsupported."""
    check_dtypes("mlp", x, w_fc)
    x_rows = x.reshape(-1, x.shape[-1]).contiguous()
    y, _ = mlp_fwd(x_rows, w_fc, b_fc, w_proj, b_proj, save_h)
    return y.view(x.shape)
