"""Linear, bias, GELU, Linear, with the activation inside the matrix products that make and consume it.

Of the six products of an MLP's forward and backward, four are plain and stay with cuBLAS. The other two have something
to do with the (N, F) tensor that they produce, F = 4 C, and do it while a tile of it is in registers:

    forward   h = x W_fc^T + b_fc     stores h, for the backward, and a = gelu(h)       y = a W_proj^T + b_proj
    backward  da = dy W_proj          loads h; stores dh = da gelu'(h), and a again     dW_proj = dy^T a
              db_fc = sum_rows dh     adds up a tile's rows, a partial sum each         dx = dh W_fc, dW_fc = dh^T x

Eager makes six passes over an (N, F) tensor besides: gelu reads h and writes a; its backward reads da and h and writes
dh; the bias sum reads dh. At N = 65,536, C = 768 each is 0.4 GB, so 0.6 ms of 3.4. Here only h is kept: a is formed
anew in the backward, for a store that the product hides (a kept would be 0.4 GB a layer). h is rounded before gelu sees
it, so both times a is the same bits.

Both kernels are one: a persistent matrix product, a program a multiprocessor walking over tiles in an order that keeps
its operands in the L2. At K = C = 768 a product of (N, K) x (K, F) does 2 K F / (K + 3 F) = 430 FLOP a byte of x, h and
a, twice an H200's 206: the stores can be hidden. This kernel cannot hide them, since its tensor cores wait while it is
in an epilogue: on an H200 0.71 ms forward and 1.42 backward, where cuBLAS takes 0.42 for the product alone. So on
Hopper, for 16 bits, _gluon.py's does the same in 0.49 and 0.61 ms; this one is for other GPUs and dtypes, and to read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import direct
from kernels.gpu import check_dtypes, processors, triton_detail
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.mlp import _gluon
from kernels.tuned import tuned

K0 = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): gelu(h) = h sigmoid(K0 (h + K1 h^3)), the tanh form
K1 = tl.constexpr(0.044715)
NAMES = "BLOCK_N", "BLOCK_F", "BLOCK_C", "num_warps", "num_stages", "programs"
RUNS = ("mlp_(gluon_)?kernel|::mlp_fwd",)


def detail(x: Tensor, w_fc: Tensor, **rest) -> str:
    F, C = w_fc.shape
    return triton_detail(x=x) + ", Gluon" * _gluon.takes(x.dtype, C, F, x.device)


@triton.jit
def _slope(h):
    """gelu(h) / h, fp32."""
    return 1 / (1 + tl.exp(-(h + h * h * h * K1) * K0))


@triton.jit(do_not_specialize=["N"])  # a batch of another size compiles nothing
def _mlp_kernel(
    x_ptr,  # forward: x (N, C); backward: dy (N, C)
    w_ptr,  # forward: w_fc (F, C); backward: w_proj (C, F)
    b_ptr,  # forward: b_fc (F,)
    h_ptr,  # (N, F); the backward reads it
    a_ptr,  # (N, F) gelu(h)
    dh_ptr,  # (N, F), backward only
    partial_ptr,  # (tiles of N, F) fp32: sums of dh's rows, backward only
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
        # GROUP tiles down before one to the right: 132 programs then share few rows of x and few of w
        band = tile // (GROUP * tiles_f)
        height = min(tiles_n - band * GROUP, GROUP)
        tile_n = band * GROUP + (tile % (GROUP * tiles_f)) % height
        n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]  # int64: N F passes 2^31
        f = (tile % (GROUP * tiles_f)) // height * BLOCK_F + tl.arange(0, BLOCK_F)
        total = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            rows = tl.load(x_ptr + n * C + c[None, :], (n < N) & (c < C)[None, :], other=0.0)
            # (BLOCK_C, BLOCK_F) of the (C, F) matrix, which the forward has as its transpose
            at = c[:, None] * F + f[None, :] if BACKWARD else f[None, :] * C + c[:, None]
            columns = tl.load(w_ptr + at, (c < C)[:, None] & (f < F)[None, :], other=0.0)
            total = tl.dot(rows, columns, total, input_precision=PRECISION)
        at, here = n * F + f[None, :], (n < N) & (f < F)[None, :]
        if BACKWARD:
            h = tl.load(h_ptr + at, here, other=0.0).to(tl.float32)
            s = _slope(h)
            dh = (total * (s + h * s * (1 - s) * (1 + h * h * (3 * K1)) * K0)).to(dtype)
            tl.store(dh_ptr + at, dh, here)
            if HAS_BIAS:
                tl.store(partial_ptr + tile_n.to(tl.int64) * F + f, tl.sum(dh.to(tl.float32), 0), f < F)
        else:
            if HAS_BIAS:
                total += tl.load(b_ptr + f, f < F, other=0.0).to(tl.float32)[None, :]
            kept = total.to(dtype)
            tl.store(h_ptr + at, kept, here)
            h = kept.to(tl.float32)
            s = _slope(h)
        tl.store(a_ptr + at, (h * s).to(dtype), here)


def tiling(dtype: torch.dtype, backward: bool) -> dict:
    """Tile sizes and launch parameters; `programs` are those of a multiprocessor."""
    if dtype == torch.float32:  # exact products are for comparisons
        return dict(zip(NAMES, (64, 256, 128, 8, 1, 1), strict=True)) | {"GROUP": 8}
    return dict(zip(NAMES, (128, 64 if backward else 128, 32, 8, 3, 1), strict=True)) | {"GROUP": 8}


def candidates(kernel: str, default: dict) -> list[dict]:
    """What scripts/tune.py tries. Of two programs a multiprocessor one can store while the other multiplies."""
    if "SLICE" in default:
        return _gluon.candidates(kernel == "mlp_bwd")
    sizes = [(128, 128, 32, 8, 3, 1), (128, 128, 32, 8, 4, 1), (128, 128, 64, 8, 3, 1), (128, 64, 32, 8, 3, 1)]
    sizes += [(128, 64, 32, 4, 4, 2), (64, 128, 32, 4, 3, 2), (64, 64, 32, 4, 3, 4)]
    return [dict(zip(NAMES, size, strict=True)) for size in sizes] + [{"GROUP": 4}, {"GROUP": 16}]


def launch(x: Tensor, F: int, backward: bool) -> tuple[bool, dict]:
    """Whether the kernel for x, or dy, of (N, C) is that of _gluon.py, and what it is launched with."""
    C, device = x.shape[1], x.device
    hopper = _gluon.takes(x.dtype, C, F, device)
    default = _gluon.tiling() if hopper else tiling(x.dtype, backward)
    return hopper, tuned("mlp_bwd" if backward else "mlp_fwd", f"{C} {F} {x.dtype}", default, device)


def multiply(x, w, b, h, a, dh=None, partial=None) -> None:
    """The kernel; forward without dh. All tensors are contiguous."""
    (N, C), F = x.shape, h.shape[1]
    hopper, size = launch(x, F, dh is not None)
    if hopper:
        _gluon.multiply(x, w, b, h, a, dh, partial, size)
        return
    programs = size.pop("programs") * processors(x.device)
    tiles = triton.cdiv(N, size["BLOCK_N"]) * triton.cdiv(F, size["BLOCK_F"])
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
        BACKWARD=dh is not None,
        HAS_BIAS=partial is not None if dh is not None else b is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",  # of fp32 alone
        **size,
    )


@torch.library.custom_op("hotswap::mlp_fwd", mutates_args=())
def mlp_fwd(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """x (N, C) -> y (N, C), and h (N, F) for the backward, or with keep=False nothing."""
    h = x.new_empty(len(x), len(w_fc))
    a = torch.empty_like(h)
    multiply(x, w_fc, b_fc, h, a)
    y = a @ w_proj.T if b_proj is None else torch.addmm(b_proj, a, w_proj.T)
    return y, h if keep else h.new_empty(0)


@mlp_fwd.register_fake
def _(x, w_fc, b_fc, w_proj, b_proj, keep):
    return torch.empty_like(x), x.new_empty((len(x), len(w_fc)) if keep else 0)


@torch.library.custom_op("hotswap::mlp_bwd", mutates_args=())
def mlp_bwd(
    dy: Tensor, x: Tensor, h: Tensor | None, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, has_b_proj: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dw_fc, db_fc, dw_proj, db_proj; a bias's is empty where there is none. Without h it is computed once more."""
    N, F = len(x), len(w_fc)
    a, dh = x.new_empty(N, F), x.new_empty(N, F)
    if h is None:
        h = dh  # each of its tiles is read before it is overwritten, by the same program
        multiply(x, w_fc, b_fc, h, a)
    partial, db_fc = None, x.new_empty(0)
    if b_fc is not None:
        tiles = triton.cdiv(N, launch(dy, F, True)[1]["BLOCK_N"])
        partial = torch.empty(tiles, F, dtype=torch.float32, device=x.device)
    multiply(dy, w_proj, None, h, a, dh, partial)
    if b_fc is not None:
        db_fc = partial.sum(0).to(x.dtype)
    db_proj = dy.sum(0) if has_b_proj else x.new_empty(0)
    return dh @ w_fc, dh.T @ x, db_fc, dy.T @ a, db_proj


@mlp_bwd.register_fake
def _(dy, x, h, w_fc, b_fc, w_proj, has_b_proj):
    db_fc, db_proj = x.new_empty(len(w_fc) * (b_fc is not None)), x.new_empty(len(w_proj) * has_b_proj)
    return torch.empty_like(x), torch.empty_like(w_fc), db_fc, torch.empty_like(w_proj), db_proj


def _setup_context(ctx, inputs, output):
    x, w_fc, b_fc, w_proj, b_proj, keep = inputs
    ctx.save_for_backward(x, output[1] if keep else None, w_fc, b_fc, w_proj)
    ctx.biases = b_fc is not None, b_proj is not None
    ctx.set_materialize_grads(False)  # h has none, and zeros of (N, F) would take 0.1 ms


def _backward(ctx, dy, _dh):
    has_b_fc, has_b_proj = ctx.biases
    dx, dw_fc, db_fc, dw_proj, db_proj = mlp_bwd(dy.contiguous(), *ctx.saved_tensors, has_b_proj)
    return dx, dw_fc, db_fc if has_b_fc else None, dw_proj, db_proj if has_b_proj else None, None


mlp_bwd = direct(mlp_bwd)
mlp_fwd = direct(mlp_fwd, _backward, _setup_context)


def mlp(x, w_fc, b_fc, w_proj, b_proj):
    return apply(x, w_fc, b_fc, w_proj, b_proj, keep=True)


def apply(x, w_fc, b_fc, w_proj, b_proj, keep):
    """The op over rows, in the shapes of the contract."""
    check_dtypes("mlp", x, w_fc)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y, _ = mlp_fwd(flat, w_fc.contiguous(), b_fc, w_proj.contiguous(), b_proj, keep)
    return y.view(x.shape)
