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
its operands in the L2, with tiles fetched by TMA on Hopper and by pointers elsewhere. At K = C = 768 a product of
(N, K) x (K, F) does 2 K F / (K + 3 F) = 430 FLOP a byte of x, h and a, twice an H200's 206: the stores can be hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import check_dtypes, has_tma, processors
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.tuned import tuned

K0 = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): gelu(h) = h sigmoid(K0 (h + K1 h^3)), the tanh form
K1 = tl.constexpr(0.044715)


@triton.jit
def _load(source, row, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """A tile at (row, column), zero beyond the matrix."""
    if TMA:
        tile = source.load([row, column])
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = r.to(tl.int64)[:, None] * stride + c[None, :]
        tile = tl.load(source + at, (r < rows)[:, None] & (c < columns)[None, :], other=0.0)
    return tile


@triton.jit
def _store(
    target, tile, row, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    if TMA:
        target.store([row, column], tile)
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = r.to(tl.int64)[:, None] * stride + c[None, :]
        tl.store(target + at, tile, (r < rows)[:, None] & (c < columns)[None, :])


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
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    x, w, h_at, a_at, dh_at = x_ptr, w_ptr, h_ptr, a_ptr, dh_ptr
    if TMA:
        x = tl.make_tensor_descriptor(x_ptr, [N, C], [C, 1], [BLOCK_N, BLOCK_C])
        if BACKWARD:
            w = tl.make_tensor_descriptor(w_ptr, [C, F], [F, 1], [BLOCK_C, BLOCK_F])
            dh_at = tl.make_tensor_descriptor(dh_ptr, [N, F], [F, 1], [BLOCK_N, BLOCK_F])
        else:
            w = tl.make_tensor_descriptor(w_ptr, [F, C], [C, 1], [BLOCK_F, BLOCK_C])
        h_at = tl.make_tensor_descriptor(h_ptr, [N, F], [F, 1], [BLOCK_N, BLOCK_F])
        a_at = tl.make_tensor_descriptor(a_ptr, [N, F], [F, 1], [BLOCK_N, BLOCK_F])
    dtype = h_ptr.dtype.element_ty
    tiles_n, tiles_f = tl.cdiv(N, BLOCK_N), tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_f, tl.num_programs(0), flatten=True):
        # GROUP tiles down before one to the right: 132 programs then share few rows of x and few of w
        band = tile // (GROUP * tiles_f)
        height = min(tiles_n - band * GROUP, GROUP)
        tile_n = band * GROUP + (tile % (GROUP * tiles_f)) % height
        n, f = tile_n * BLOCK_N, (tile % (GROUP * tiles_f)) // height * BLOCK_F
        total = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
        for c in range(0, C, BLOCK_C):
            rows = _load(x, n, c, N, C, C, BLOCK_N, BLOCK_C, TMA)
            if BACKWARD:
                columns = _load(w, c, f, C, F, F, BLOCK_C, BLOCK_F, TMA)
            else:
                columns = _load(w, f, c, F, C, C, BLOCK_F, BLOCK_C, TMA).T
            total = tl.dot(rows, columns, total, input_precision=PRECISION)
        real = f + tl.arange(0, BLOCK_F) < F
        if BACKWARD:
            h = _load(h_at, n, f, N, F, F, BLOCK_N, BLOCK_F, TMA).to(tl.float32)
            s = _slope(h)
            dh = (total * (s + h * s * (1 - s) * (1 + h * h * (3 * K1)) * K0)).to(dtype)
            _store(dh_at, dh, n, f, N, F, F, BLOCK_N, BLOCK_F, TMA)
            if HAS_BIAS:
                sums = partial_ptr + tile_n.to(tl.int64) * F + f + tl.arange(0, BLOCK_F)
                tl.store(sums, tl.sum(dh.to(tl.float32), 0), real)
        else:
            if HAS_BIAS:
                total += tl.load(b_ptr + f + tl.arange(0, BLOCK_F), real, other=0.0).to(tl.float32)[None, :]
            kept = total.to(dtype)
            _store(h_at, kept, n, f, N, F, F, BLOCK_N, BLOCK_F, TMA)
            h = kept.to(tl.float32)
            s = _slope(h)
        _store(a_at, (h * s).to(dtype), n, f, N, F, F, BLOCK_N, BLOCK_F, TMA)


def tiling(dtype: torch.dtype, C: int, F: int, backward: bool, tma: bool) -> dict:
    """Tile sizes and launch parameters; `programs` are those of a multiprocessor."""
    if dtype == torch.float32:  # exact products are for comparisons
        size = {"BLOCK_N": 64, "BLOCK_F": 256, "BLOCK_C": 128}
        return {**size, "GROUP": 8, "TMA": False, "num_warps": 8, "num_stages": 1, "programs": 1}
    tma = tma and C % 8 == 0 and F % 8 == 0  # rows at multiples of 16 bytes
    if tma:
        size = {"BLOCK_N": 128, "BLOCK_F": 128 if backward else 256, "BLOCK_C": 64}  # 165 and 181 registers, no spills
    else:
        size = {"BLOCK_N": 128, "BLOCK_F": 64 if backward else 128, "BLOCK_C": 32}
    return {**size, "GROUP": 8, "TMA": tma, "num_warps": 8, "num_stages": 3, "programs": 1}


def candidates(kernel: str, default: dict) -> list[dict]:
    """What scripts/tune.py tries. Of two programs a multiprocessor one can store while the other multiplies."""
    names = "BLOCK_N", "BLOCK_F", "BLOCK_C", "num_warps", "num_stages", "programs"
    if default["TMA"]:
        sizes = [(128, 128, 64, 8, 3, 1), (128, 128, 64, 8, 4, 1), (128, 128, 128, 8, 2, 1)]
        sizes += [(64, 128, 64, 4, 3, 2), (128, 64, 64, 4, 3, 2), (64, 64, 64, 4, 3, 2)]
        sizes += [(128, 128, 64, 8, 2, 2), (128, 128, 64, 4, 2, 2), (128, 128, 32, 4, 4, 2)]
        if kernel == "mlp_fwd":  # the backward would spill
            sizes += [(256, 128, 64, 8, 3, 1), (128, 256, 64, 8, 2, 1), (64, 256, 64, 4, 4, 1)]
    else:
        sizes = [(128, 128, 32, 8, 3, 1), (128, 128, 32, 8, 4, 1), (128, 128, 64, 8, 3, 1), (128, 64, 32, 8, 3, 1)]
        sizes += [(128, 64, 32, 4, 4, 2), (64, 128, 32, 4, 3, 2), (64, 64, 32, 4, 3, 4)]
    return [dict(zip(names, size, strict=True)) for size in sizes] + [{"GROUP": 4}, {"GROUP": 16}]


def launch(x: Tensor, F: int, backward: bool) -> dict:
    """What to launch the kernel with for x, or dy, of (N, C)."""
    C, device = x.shape[1], x.device
    default = tiling(x.dtype, C, F, backward, has_tma(device))
    return tuned("mlp_bwd" if backward else "mlp_fwd", f"{C} {F} {x.dtype}", default, device)


def multiply(x, w, b, h, a, dh=None, partial=None) -> None:
    """The kernel; forward without dh. All tensors are contiguous."""
    (N, C), F = x.shape, h.shape[1]
    size = launch(x, F, dh is not None)
    programs = size.pop("programs") * processors(x.device)
    if size["TMA"]:
        triton.set_allocator(lambda bytes, alignment, stream: torch.empty(bytes, dtype=torch.int8, device=x.device))
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
        tiles = triton.cdiv(N, launch(dy, F, True)["BLOCK_N"])
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


mlp_fwd.register_autograd(_backward, setup_context=_setup_context)


def mlp(x, w_fc, b_fc, w_proj, b_proj):
    return apply(x, w_fc, b_fc, w_proj, b_proj, keep=True)


def apply(x, w_fc, b_fc, w_proj, b_proj, keep):
    """The op over rows, in the shapes of the contract."""
    check_dtypes("mlp", x, w_fc)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y, _ = mlp_fwd(flat, w_fc.contiguous(), b_fc, w_proj.contiguous(), b_proj, keep)
    return y.view(x.shape)
